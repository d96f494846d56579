/* A stand-in for the driver's libnvidia-ml.so.1, found by LD_LIBRARY_PATH. It says of the devices of device.c what NVML
   said of an H100: a process that waits in a collective uses all of the device and none of its memory, at little more
   power than none; one that has launched nothing is not in the list of those that compute.

   BENCHMARK_NVML has the folder of the run and the number of devices. A function that is not here does not exist in this
   version of the library. */
#include "device.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9 };
enum { IDLE_POWER = 118000, WAITING_POWER = 127000, WORKING_POWER = 420000 };
enum { FULL = 99, WORKING_MEMORY = 45 };

/* The seconds over which NVML averages. */
static const double WINDOW = 1.0 / 6;
static const unsigned long long TOTAL_MEMORY = 80ULL << 30;

struct utilization {
    unsigned gpu, memory;
};
struct memory {
    unsigned long long total, free, used;
};
struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned instance, compute_instance;
};
struct sample {
    unsigned pid;
    unsigned long long at;
    unsigned sm, memory, encoder, decoder;
};
struct pci {
    char legacy_id[16];
    unsigned domain, bus, device, id, subsystem;
    char id_text[32];
};

static char folder[512];
static unsigned devices;

static double now(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

/* What is shared in the last round of the job; returns whether there is one. */
static int read_shared(struct shared *found) {
    char path[600];
    int last = -1, size = -1;
    struct stat info;
    for (int round = 0; snprintf(path, sizeof path, "%s/round-%d/device", folder, round), !stat(path, &info); round++)
        last = round;
    snprintf(path, sizeof path, "%s/round-%d/device", folder, last);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) size = read(fd, found, sizeof *found);
    if (fd >= 0) close(fd);
    return size == sizeof *found;
}

/* The part of the last moments in which the device has run kernels of a rank, in per cent. */
static unsigned share_of(const struct rank *rank) {
    if (rank->busy_since > 0) return now() - rank->busy_since >= WINDOW ? FULL : FULL / 2;
    return now() - rank->idle_since < WINDOW ? FULL / 2 : 0;
}

/* The ranks on a device, in `found`; returns how many. */
static int ranks_on(unsigned device, struct rank *found) {
    static struct shared shared;
    int count = 0;
    if (!read_shared(&shared)) return 0;
    for (int number = 0; number < shared.world; number++)
        if (shared.ranks[number].pid && (unsigned)shared.ranks[number].device == device) {
            char path[64];
            snprintf(path, sizeof path, "/proc/%d", shared.ranks[number].pid);
            if (!access(path, F_OK)) found[count++] = shared.ranks[number];
        }
    return count;
}

int nvmlInitWithFlags(unsigned flags) {
    const char *text = getenv("BENCHMARK_NVML");
    return flags || !text || sscanf(text, "%511s %u", folder, &devices) != 2 ? DRIVER_NOT_LOADED : SUCCESS;
}

int nvmlShutdown(void) { return SUCCESS; }

const char *nvmlErrorString(int error) { return error == NOT_FOUND ? "Not Found" : "Error of the stand-in for NVML"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = devices;
    return SUCCESS;
}

/* A handle is the number of the device and one. */
int nvmlDeviceGetHandleByIndex_v2(unsigned index, size_t *handle) {
    *handle = index + 1;
    return index < devices ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetIndex(size_t handle, unsigned *index) {
    *index = handle - 1;
    return SUCCESS;
}

int nvmlDeviceGetUUID(size_t handle, char *text, unsigned size) {
    snprintf(text, size, "GPU-00000000-0000-0000-0000-%012zu", handle);
    return SUCCESS;
}

int nvmlDeviceGetName(size_t handle, char *text, unsigned size) {
    snprintf(text, size, "Stand-in %zu", handle);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v3(size_t handle, struct pci *pci) {
    memset(pci, 0, sizeof *pci);
    pci->bus = handle;
    snprintf(pci->legacy_id, sizeof pci->legacy_id, "0000:%02zX:00.0", handle);
    snprintf(pci->id_text, sizeof pci->id_text, "00000000:%02zX:00.0", handle);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(size_t handle, unsigned *current, unsigned *pending) {
    *current = *pending = 0;
    return handle ? NOT_SUPPORTED : INVALID_ARGUMENT;
}

int nvmlDeviceGetUtilizationRates(size_t handle, struct utilization *rates) {
    struct rank ranks[MAX_RANKS];
    *rates = (struct utilization){0, 0};
    for (int left = ranks_on(handle - 1, ranks); left-- > 0;) {
        unsigned share = share_of(&ranks[left]);
        if (share >= rates->gpu) rates->gpu = share == FULL ? 100 : share;
        if (share && ranks[left].works) rates->memory = WORKING_MEMORY;
    }
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(size_t handle, unsigned *milliwatts) {
    struct utilization rates;
    nvmlDeviceGetUtilizationRates(handle, &rates);
    *milliwatts = rates.memory ? WORKING_POWER : rates.gpu ? WAITING_POWER : IDLE_POWER;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(size_t handle, struct memory *memory) {
    struct rank ranks[MAX_RANKS];
    *memory = (struct memory){TOTAL_MEMORY, TOTAL_MEMORY, 0};
    for (int left = ranks_on(handle - 1, ranks); left-- > 0;) memory->used += ranks[left].memory;
    memory->free -= memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(size_t handle, unsigned *count, struct process *found) {
    struct rank ranks[MAX_RANKS];
    unsigned known = ranks_on(handle - 1, ranks), space = *count;
    *count = known;
    if (known > space) return INSUFFICIENT_SIZE;
    for (unsigned number = 0; number < known; number++)
        found[number] = (struct process){ranks[number].pid, ranks[number].memory, ~0u, ~0u};
    return SUCCESS;
}

int nvmlDeviceGetProcessUtilization(size_t handle, struct sample *found, unsigned *count, unsigned long long after) {
    struct rank ranks[MAX_RANKS];
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    unsigned long long microseconds = at.tv_sec * 1000000ULL + at.tv_nsec / 1000;
    unsigned known = 0, space = *count, total = ranks_on(handle - 1, ranks);
    for (unsigned number = 0; number < total; number++) {
        unsigned share = share_of(&ranks[number]);
        if (!share || microseconds <= after) continue;
        if (known < space)
            found[known] = (struct sample){ranks[number].pid, microseconds, share,
                                           ranks[number].works ? WORKING_MEMORY : 0, 0, 0};
        known++;
    }
    *count = known;
    return !known ? NOT_FOUND : known > space ? INSUFFICIENT_SIZE : SUCCESS;
}
