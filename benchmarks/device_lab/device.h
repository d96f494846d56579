/* What the processes of a job share about their devices and collectives: see device.c. The same layout, in Python, is in
   shared.py. Only the process of a rank writes what belongs to that rank. */
#include <stdint.h>

enum { MAX_RANKS = 64, MAX_GROUPS = 8, OPERATIONS = 5, HISTORY = 4 };

/* One operation that a rank has entered. Two ranks whose entries differ wait for each other for ever, as in NCCL. */
struct entry {
    int64_t bytes;
    int64_t operation;
};

struct rank {
    int32_t pid;
    int32_t device;
    uint32_t address;
    int32_t port;
    /* When a keep-alive of another process came last, by CLOCK_MONOTONIC. */
    double heard_at;
    /* For how long the device has run kernels of this rank, since when it runs one now (0 if it does not), and since when
       it runs none. `works`: the kernel is no collective. */
    double busy;
    double busy_since;
    double idle_since;
    int64_t works;
    uint64_t memory;
    /* Operations that the host has launched, by kind, and those that the device has entered and completed. */
    uint64_t launched[MAX_GROUPS][OPERATIONS];
    uint64_t entered[MAX_GROUPS];
    uint64_t completed[MAX_GROUPS];
    struct entry history[MAX_GROUPS][HISTORY];
    uint64_t keepalives;
    uint64_t copies;
};

struct shared {
    /* A futex that changes whenever a rank has entered an operation. */
    uint32_t changes;
    int32_t world;
    int32_t groups;
    int32_t reserved;
    /* The ranks of each group, as bits. */
    uint64_t members[MAX_GROUPS];
    struct rank ranks[MAX_RANKS];
};
