/* A stand-in for NVIDIA's libnvidia-ml.so.1, for processes that a test starts.

   The directory in NVML_STUB has a file for each GPU, "gpu0", "gpu1", ..., whose lines are NAME=NUMBER (lost, action,
   memory_errors, used, total, refused), or pid=NUMBER and utilization=PID:PERCENT, which may come several times; and a
   file "events", whose lines are "GPU XID". They are read anew at each call; a line that is added to "events" is an
   event of each set that exists by then, and wakes those that wait. A registration for events adds the line "PID GPU" to
   "registered". */

#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

enum { OK = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, TOO_SMALL = 7, TIMED_OUT = 10, LOST = 15 };
enum { MAX_GPUS = 16, MAX_LINES = 256 };

typedef struct { int index; } device;
typedef struct { long at; int notify; int registered[MAX_GPUS]; } event_set;
typedef struct { device *gpu; unsigned long long kind, data; unsigned gpu_instance, compute_instance; } event_data;

static device gpus[MAX_GPUS];

static void path_of(char *path, size_t size, const char *name) {
    const char *directory = getenv("NVML_STUB");
    snprintf(path, size, "%s/%s", directory ? directory : "/nonexistent", name);
}

static FILE *open_gpu(int index) {
    char path[4096], name[16];
    snprintf(name, sizeof name, "gpu%d", index);
    path_of(path, sizeof path, name);
    return fopen(path, "r");
}

/* The values of a name, at most `most`; returns how many there are. */
static int values(int index, const char *name, unsigned long long *found, int most) {
    char line[256];
    int count = 0;
    size_t length = strlen(name);
    FILE *file = open_gpu(index);
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, name, length) && line[length] == '=' && count < most)
            found[count++] = strtoull(line + length + 1, NULL, 10);
    fclose(file);
    return count;
}

static int value(int index, const char *name, unsigned long long *found) { return values(index, name, found, 1); }

static int is_lost(device *gpu) {
    unsigned long long lost = 0;
    return value(gpu->index, "lost", &lost) && lost;
}

int nvmlInit_v2(void) { return getenv("NVML_STUB") ? OK : 9; }
int nvmlInitWithFlags(unsigned flags) { return nvmlInit_v2(); }
int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int code) {
    switch (code) {
    case OK: return "Success";
    case NOT_SUPPORTED: return "Not Supported";
    case NO_PERMISSION: return "Insufficient Permissions";
    case NOT_FOUND: return "Not Found";
    case 9: return "Driver Not Loaded";
    case TIMED_OUT: return "Timeout";
    case LOST: return "GPU is lost";
    default: return "Unknown Error";
    }
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    FILE *file;
    for (*count = 0; *count < MAX_GPUS && (file = open_gpu(*count)); fclose(file)) ++*count;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **gpu) {
    unsigned count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count) return 2;
    *gpu = &gpus[index];
    (*gpu)->index = index;
    return is_lost(*gpu) ? LOST : OK;
}

int nvmlDeviceGetIndex(device *gpu, unsigned *index) { *index = gpu->index; return OK; }

int nvmlDeviceGetUUID(device *gpu, char *uuid, unsigned size) {
    if (is_lost(gpu)) return LOST;
    snprintf(uuid, size, "GPU-0000000%d-0000-0000-0000-000000000000", gpu->index);
    return OK;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char address[32];
} pci_info;

int nvmlDeviceGetPciInfo_v3(device *gpu, pci_info *info) {
    if (is_lost(gpu)) return LOST;
    memset(info, 0, sizeof *info);
    info->bus = 0x1a + gpu->index;
    snprintf(info->address, sizeof info->address, "00000000:%02X:00.0", info->bus);
    return OK;
}

int nvmlDeviceGetMigMode(device *gpu, unsigned *now, unsigned *pending) { return NOT_SUPPORTED; }

int nvmlDeviceGetTotalEccErrors(device *gpu, int kind, int counter, unsigned long long *count) {
    if (is_lost(gpu)) return LOST;
    return value(gpu->index, "memory_errors", count) ? OK : NOT_SUPPORTED;
}

typedef struct {
    uint32_t field, scope;
    int64_t at, latency;
    uint32_t type, code;
    union { double d; int i; unsigned u; unsigned long long ull; } value;
} field_value;

int nvmlDeviceGetFieldValues(device *gpu, int count, field_value *fields) {
    if (is_lost(gpu)) return LOST;
    for (int each = 0; each < count; each++) {
        unsigned long long action;
        fields[each].code = fields[each].field == 230 && value(gpu->index, "action", &action) ? OK : NOT_SUPPORTED;
        if (fields[each].code == OK) fields[each].value.u = action;
    }
    return OK;
}

typedef struct { unsigned long long total, free, used; } memory;

int nvmlDeviceGetMemoryInfo(device *gpu, memory *info) {
    if (is_lost(gpu)) return LOST;
    info->total = 80ull << 30;
    info->used = 0;
    value(gpu->index, "total", &info->total);
    value(gpu->index, "used", &info->used);
    info->free = info->total - info->used;
    return OK;
}

typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;

int nvmlDeviceGetComputeRunningProcesses_v3(device *gpu, unsigned *count, process *found) {
    unsigned long long pids[MAX_LINES];
    unsigned here = values(gpu->index, "pid", pids, MAX_LINES), room = *count;
    if (is_lost(gpu)) return LOST;
    *count = here;
    if (here && (!found || room < here)) return TOO_SMALL;
    for (unsigned each = 0; each < here; each++) found[each] = (process){pids[each], 1ull << 30, ~0u, ~0u};
    return OK;
}

typedef struct { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; } sample;

int nvmlDeviceGetProcessUtilization(device *gpu, sample *found, unsigned *count, unsigned long long since) {
    char line[256];
    unsigned here = 0, pid, percent, room = *count;
    FILE *file = open_gpu(gpu->index);
    if (!file || is_lost(gpu)) return LOST;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "utilization=%u:%u", &pid, &percent) == 2) {
            if (found && here < room) found[here] = (sample){pid, since + 1, percent, 0, 0, 0};
            here++;
        }
    fclose(file);
    *count = here;
    if (!here) return NOT_FOUND;
    return found && room >= here ? OK : TOO_SMALL;
}

int nvmlEventSetCreate(event_set **set) {
    char path[4096];
    path_of(path, sizeof path, "events");
    *set = calloc(1, sizeof **set);
    (*set)->notify = inotify_init1(IN_CLOEXEC | IN_NONBLOCK);
    inotify_add_watch((*set)->notify, path, IN_MODIFY);
    FILE *file = fopen(path, "r");
    if (file) {
        fseek(file, 0, SEEK_END);
        (*set)->at = ftell(file);
        fclose(file);
    }
    return OK;
}

int nvmlEventSetFree(event_set *set) { close(set->notify); free(set); return OK; }

int nvmlDeviceGetSupportedEventTypes(device *gpu, unsigned long long *kinds) { *kinds = 0x1f; return OK; }

int nvmlDeviceRegisterEvents(device *gpu, unsigned long long kinds, event_set *set) {
    unsigned long long refused = 0;
    if (value(gpu->index, "refused", &refused) && refused) return NO_PERMISSION;
    set->registered[gpu->index] = 1;
    char path[4096];
    path_of(path, sizeof path, "registered");
    FILE *file = fopen(path, "a");
    if (file) {
        fprintf(file, "%d %d\n", getpid(), gpu->index);
        fclose(file);
    }
    return OK;
}

int nvmlEventSetWait_v2(event_set *set, event_data *data, unsigned timeout) {
    char path[4096], line[256], drained[4096];
    path_of(path, sizeof path, "events");
    for (;;) {
        while (read(set->notify, drained, sizeof drained) > 0) continue;
        FILE *file = fopen(path, "r");
        int index = -1, number = 0;
        if (file) {
            fseek(file, set->at, SEEK_SET);
            while (index < 0 && fgets(line, sizeof line, file) && strchr(line, '\n')) {
                set->at = ftell(file);
                if (sscanf(line, "%d %d", &index, &number) != 2 || index >= MAX_GPUS || !set->registered[index])
                    index = -1;
            }
            fclose(file);
        }
        if (index >= 0) {
            *data = (event_data){&gpus[index], 8, number, ~0u, ~0u};
            return OK;
        }
        struct pollfd changed = {set->notify, POLLIN, 0};
        if (poll(&changed, 1, timeout > 0x7fffffff ? -1 : (int)timeout) == 0) return TIMED_OUT;
    }
}
