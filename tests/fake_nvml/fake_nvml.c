/* A stand-in for NVIDIA's libnvidia-ml.so.1: answers NVML's calls from a text file.
 *
 * FAKE_NVML_STATE       the file, lines of "key value"; read again whenever it changed (replace it by rename).
 *                       Without the file, every call says that the driver is not loaded.
 * FAKE_NVML_STATE_ONCE  if set, the file is read at the first nvmlInit only, to measure the caller alone.
 * FAKE_NVML_TRACE       a file to which each call appends "function gpu" (gpu -1: about no GPU).
 *
 * Keys, with N a GPU's index:
 *   driver TEXT, cuda 13000, error.FUNCTION CODE, delay_ms.FUNCTION MS   (FUNCTION may be *)
 *   gpu.N.uuid TEXT, gpu.N.name TEXT, gpu.N.FIELD NUMBER (see fields[]), gpu.N.process.PID BYTES,
 *   gpu.N.error.FUNCTION CODE, gpu.N.delay_ms.FUNCTION MS
 * A GPU exists if it has a uuid; indices are given without holes, in the order of N, as the driver does.
 *
 * Handles stay with the UUID they were given for, so a state that changes the order behaves like the
 * real thing. Signatures and codes: NVML API reference, nvml.h.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 64
#define MAX_PROCESSES 64
#define MAX_RULES 256
#define TEXT 128

enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9, GPU_IS_LOST = 15, ARGUMENT_VERSION_MISMATCH = 25, UNKNOWN = 999 };

typedef unsigned long long u64;

enum { BUSY, MEMORY_BUSY, MEMORY_TOTAL, MEMORY_USED, MEMORY_RESERVED, POWER_MW, POWER_LIMIT_MW, TEMPERATURE_C,
       SM_CLOCK_MHZ, MEMORY_CLOCK_MHZ, MAX_SM_CLOCK_MHZ, MAX_MEMORY_CLOCK_MHZ, FAN, THROTTLE_REASONS, PCIE_TX_KB,
       PCIE_RX_KB, PCIE_GENERATION, PCIE_WIDTH, MIG, ENERGY_MJ, PERFORMANCE_STATE, COMPUTE_MAJOR, COMPUTE_MINOR, FIELDS };

static const char *fields[FIELDS] = {
    "busy", "memory_busy", "memory_total", "memory_used", "memory_reserved", "power_mw", "power_limit_mw",
    "temperature_c", "sm_clock_mhz", "memory_clock_mhz", "max_sm_clock_mhz", "max_memory_clock_mhz", "fan",
    "throttle_reasons", "pcie_tx_kb", "pcie_rx_kb", "pcie_generation", "pcie_width", "mig", "energy_mj",
    "performance_state", "compute_major", "compute_minor"};

typedef struct {
    char uuid[TEXT], name[TEXT];
    long long value[FIELDS];
    unsigned processes, pid[MAX_PROCESSES];
    u64 memory[MAX_PROCESSES];
} gpu_t;

typedef struct {
    int gpu; /* N in the file, -1: any call */
    int delay;
    char function[TEXT];
    long long value;
} rule_t;

typedef struct {
    int loaded, count, cuda, rules;
    char driver[TEXT];
    int order[MAX_GPUS]; /* index -> N */
    gpu_t gpu[MAX_GPUS];
    rule_t rule[MAX_RULES];
} state_t;

typedef struct { char uuid[TEXT]; int gpu; } slot_t; /* what a handle points to; gpu: N, or -1 if not there now */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static state_t state;
static slot_t slots[4 * MAX_GPUS];
static int slot_count, references, trace_fd = -1, parsed;
static struct stat seen;

static void parse_gpu(int n, char *key, char *value) {
    gpu_t *gpu = &state.gpu[n];
    if (!strcmp(key, "uuid")) snprintf(gpu->uuid, TEXT, "%s", value);
    else if (!strcmp(key, "name")) snprintf(gpu->name, TEXT, "%s", value);
    else if (!strncmp(key, "process.", 8)) {
        if (gpu->processes < MAX_PROCESSES) {
            gpu->pid[gpu->processes] = strtoul(key + 8, NULL, 10);
            gpu->memory[gpu->processes++] = strtoull(value, NULL, 0);
        }
    } else
        for (int f = 0; f < FIELDS; f++)
            if (!strcmp(key, fields[f])) gpu->value[f] = strtoll(value, NULL, 0);
}

static void parse_line(char *line) {
    char *value = strchr(line, ' '), *key = line;
    int n = -1, length = 0;
    if (!value) return;
    *value++ = 0;
    if (sscanf(key, "gpu.%d.%n", &n, &length) == 1 && length) {
        if (n < 0 || n >= MAX_GPUS) return;
        key += length;
    } else n = -1;
    int delay = !strncmp(key, "delay_ms.", 9), error = !strncmp(key, "error.", 6);
    if (delay || error) {
        if (state.rules < MAX_RULES) {
            rule_t *rule = &state.rule[state.rules++];
            rule->gpu = n;
            rule->delay = delay;
            rule->value = strtoll(value, NULL, 0);
            snprintf(rule->function, TEXT, "%s", key + (delay ? 9 : 6));
        }
    } else if (n >= 0) parse_gpu(n, key, value);
    else if (!strcmp(key, "driver")) snprintf(state.driver, TEXT, "%s", value);
    else if (!strcmp(key, "cuda")) state.cuda = atoi(value);
}

/* Bring the state up to date with its file. Call with the lock held. */
static void refresh(void) {
    const char *path = getenv("FAKE_NVML_STATE");
    struct stat now;
    if (parsed && getenv("FAKE_NVML_STATE_ONCE")) return;
    if (!path || stat(path, &now)) {
        memset(&state, 0, sizeof state);
        parsed = 0;
        return;
    }
    if (parsed && now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return;
    FILE *file = fopen(path, "re");
    char line[512];
    if (!file) return;
    fstat(fileno(file), &seen);
    memset(&state, 0, sizeof state);
    for (int n = 0; n < MAX_GPUS; n++) state.gpu[n].value[MIG] = -1;
    while (fgets(line, sizeof line, file)) {
        line[strcspn(line, "\n")] = 0;
        parse_line(line);
    }
    fclose(file);
    state.loaded = parsed = 1;
    for (int n = 0; n < MAX_GPUS; n++)
        if (*state.gpu[n].uuid) state.order[state.count++] = n;
    for (int s = 0; s < slot_count; s++) {
        slots[s].gpu = -1;
        for (int i = 0; i < state.count; i++)
            if (!strcmp(slots[s].uuid, state.gpu[state.order[i]].uuid)) slots[s].gpu = state.order[i];
    }
}

static slot_t *slot_of(int n) {
    for (int s = 0; s < slot_count; s++)
        if (!strcmp(slots[s].uuid, state.gpu[n].uuid)) return &slots[s];
    if (slot_count == (int)(sizeof slots / sizeof *slots)) return NULL;
    slot_t *slot = &slots[slot_count++];
    strcpy(slot->uuid, state.gpu[n].uuid);
    slot->gpu = n;
    return slot;
}

/* What every call does first: trace, wait, fail as told. n: the GPU's N, or -1. Leaves with the lock held. */
static int enter(const char *function, int n, int needs_init) {
    long long delay_ms = 0;
    int code = SUCCESS;
    if (trace_fd >= 0) {
        char line[TEXT + 16];
        int length = snprintf(line, sizeof line, "%s %d\n", function, n);
        if (write(trace_fd, line, length) < 0) code = SUCCESS;
    }
    for (int r = 0; r < state.rules; r++) {
        rule_t *rule = &state.rule[r];
        if ((rule->gpu != -1 && rule->gpu != n) || (strcmp(rule->function, "*") && strcmp(rule->function, function))) continue;
        if (rule->delay) delay_ms = rule->value;
        else if (!code) code = (int)rule->value;
    }
    if (!state.loaded) code = DRIVER_NOT_LOADED;
    if (needs_init && !references) code = UNINITIALIZED;
    if (delay_ms > 0) {
        struct timespec wait = {delay_ms / 1000, delay_ms % 1000 * 1000000};
        pthread_mutex_unlock(&lock);
        nanosleep(&wait, NULL);
        pthread_mutex_lock(&lock);
    }
    return code;
}

static int enter_system(const char *function, int needs_init) {
    pthread_mutex_lock(&lock);
    refresh();
    return enter(function, -1, needs_init);
}

static int enter_device(const char *function, void *handle, gpu_t **gpu) {
    slot_t *slot = handle;
    pthread_mutex_lock(&lock);
    refresh();
    if (slot < slots || slot >= slots + slot_count) return INVALID_ARGUMENT;
    int code = enter(function, slot->gpu, 1);
    if (code) return code;
    if (slot->gpu < 0) return GPU_IS_LOST;
    *gpu = &state.gpu[slot->gpu];
    return SUCCESS;
}

static int leave(int code) {
    pthread_mutex_unlock(&lock);
    return code;
}

static int put_text(char *target, unsigned size, const char *text) {
    if (!target || strlen(text) >= size) return target ? INSUFFICIENT_SIZE : INVALID_ARGUMENT;
    strcpy(target, text);
    return SUCCESS;
}

/* ---- the system ---- */

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    const char *trace = getenv("FAKE_NVML_TRACE");
    if (!references) { /* a process's next user of this library may want its trace elsewhere */
        if (trace_fd >= 0) close(trace_fd);
        trace_fd = trace ? open(trace, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666) : -1;
    }
    refresh();
    int code = enter("nvmlInitWithFlags", -1, 0);
    if (!code) references++;
    return leave(code);
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlInit(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    int code = enter_system("nvmlShutdown", 1);
    if (references > 0) references--;
    return leave(code);
}

const char *nvmlErrorString(int code) {
    static const struct { int code; const char *text; } words[] = {
        {0, "Success"}, {1, "Uninitialized"}, {2, "Invalid Argument"}, {3, "Not Supported"},
        {4, "Insufficient Permissions"}, {6, "Not Found"}, {7, "Insufficient Size"}, {9, "Driver Not Loaded"},
        {10, "Timeout"}, {12, "NVML Shared Library Not Found"}, {13, "Function Not Found"}, {15, "GPU is lost"},
        {16, "GPU requires reset"}, {18, "Driver/library version mismatch"}, {25, "Argument version mismatch"}};
    for (unsigned i = 0; i < sizeof words / sizeof *words; i++)
        if (words[i].code == code) return words[i].text;
    return "Unknown Error";
}

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    int code = enter_system("nvmlSystemGetDriverVersion", 1);
    return leave(code ? code : put_text(text, size, state.driver));
}

int nvmlSystemGetNVMLVersion(char *text, unsigned size) {
    int code = enter_system("nvmlSystemGetNVMLVersion", 1);
    return leave(code ? code : put_text(text, size, "13.570.00"));
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    int code = enter_system("nvmlSystemGetCudaDriverVersion_v2", 1);
    if (!code) *version = state.cuda;
    return leave(code);
}

int nvmlSystemGetCudaDriverVersion(int *version) { return nvmlSystemGetCudaDriverVersion_v2(version); }

/* ---- finding devices ---- */

int nvmlDeviceGetCount_v2(unsigned *count) {
    int code = enter_system("nvmlDeviceGetCount_v2", 1);
    if (!code) *count = state.count;
    return leave(code);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    pthread_mutex_lock(&lock);
    refresh();
    int n = index < (unsigned)state.count ? state.order[index] : -1;
    int code = enter("nvmlDeviceGetHandleByIndex_v2", n, 1);
    if (!code && n < 0) code = INVALID_ARGUMENT;
    if (!code && !(*handle = slot_of(n))) code = UNKNOWN;
    return leave(code);
}

int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    int n = -1;
    pthread_mutex_lock(&lock);
    refresh();
    for (int i = 0; i < state.count; i++)
        if (!strcmp(uuid, state.gpu[state.order[i]].uuid)) n = state.order[i];
    int code = enter("nvmlDeviceGetHandleByUUID", n, 1);
    if (!code && n < 0) code = NOT_FOUND;
    if (!code && !(*handle = slot_of(n))) code = UNKNOWN;
    return leave(code);
}

int nvmlDeviceGetIndex(void *handle, unsigned *index) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetIndex", handle, &gpu);
    for (int i = 0; !code && i < state.count; i++)
        if (&state.gpu[state.order[i]] == gpu) *index = i;
    return leave(code);
}

int nvmlDeviceGetMinorNumber(void *handle, unsigned *minor) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetMinorNumber", handle, &gpu);
    if (!code) *minor = gpu - state.gpu;
    return leave(code);
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetName", handle, &gpu);
    return leave(code ? code : put_text(text, size, gpu->name));
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetUUID", handle, &gpu);
    return leave(code ? code : put_text(text, size, gpu->uuid));
}

typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} pci_t;

int nvmlDeviceGetPciInfo_v3(void *handle, pci_t *pci) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetPciInfo_v3", handle, &gpu);
    if (!code) {
        memset(pci, 0, sizeof *pci);
        pci->bus = gpu - state.gpu + 1;
        snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "0000:%02X:00.0", pci->bus);
        snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    }
    return leave(code);
}

/* ---- measuring ---- */

static int number(const char *function, void *handle, int field, unsigned *target) {
    gpu_t *gpu;
    int code = enter_device(function, handle, &gpu);
    if (!code) *target = (unsigned)gpu->value[field];
    return leave(code);
}

#define NUMBER(function, field) \
    int function(void *handle, unsigned *target) { return number(#function, handle, field, target); }

NUMBER(nvmlDeviceGetPowerUsage, POWER_MW)
NUMBER(nvmlDeviceGetEnforcedPowerLimit, POWER_LIMIT_MW)
NUMBER(nvmlDeviceGetPowerManagementLimit, POWER_LIMIT_MW)
NUMBER(nvmlDeviceGetFanSpeed, FAN)
NUMBER(nvmlDeviceGetCurrPcieLinkGeneration, PCIE_GENERATION)
NUMBER(nvmlDeviceGetMaxPcieLinkGeneration, PCIE_GENERATION)
NUMBER(nvmlDeviceGetCurrPcieLinkWidth, PCIE_WIDTH)
NUMBER(nvmlDeviceGetMaxPcieLinkWidth, PCIE_WIDTH)
NUMBER(nvmlDeviceGetPerformanceState, PERFORMANCE_STATE)

typedef struct { unsigned gpu, memory; } utilization_t;

int nvmlDeviceGetUtilizationRates(void *handle, utilization_t *rates) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetUtilizationRates", handle, &gpu);
    if (!code && gpu->value[MIG] == 1) code = NOT_SUPPORTED;
    if (!code) {
        rates->gpu = gpu->value[BUSY];
        rates->memory = gpu->value[MEMORY_BUSY];
    }
    return leave(code);
}

typedef struct { u64 total, free, used; } memory_t;
typedef struct { unsigned version; u64 total, reserved, free, used; } memory_v2_t;

int nvmlDeviceGetMemoryInfo(void *handle, memory_t *memory) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetMemoryInfo", handle, &gpu);
    if (!code) { /* the first version counts the driver's reserve as used */
        memory->total = gpu->value[MEMORY_TOTAL];
        memory->used = gpu->value[MEMORY_USED] + gpu->value[MEMORY_RESERVED];
        memory->free = memory->total - memory->used;
    }
    return leave(code);
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory_v2_t *memory) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetMemoryInfo_v2", handle, &gpu);
    if (!code && memory->version != 0x2000028) code = ARGUMENT_VERSION_MISMATCH;
    if (!code) {
        memory->total = gpu->value[MEMORY_TOTAL];
        memory->used = gpu->value[MEMORY_USED];
        memory->reserved = gpu->value[MEMORY_RESERVED];
        memory->free = memory->total - memory->used - memory->reserved;
    }
    return leave(code);
}

int nvmlDeviceGetTemperature(void *handle, unsigned sensor, unsigned *celsius) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetTemperature", handle, &gpu);
    if (!code && sensor) code = INVALID_ARGUMENT;
    if (!code) *celsius = (unsigned)gpu->value[TEMPERATURE_C];
    return leave(code);
}

typedef struct { unsigned version, sensor; int celsius; } temperature_t;

int nvmlDeviceGetTemperatureV(void *handle, temperature_t *temperature) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetTemperatureV", handle, &gpu);
    if (!code && temperature->version != 0x100000C) code = ARGUMENT_VERSION_MISMATCH;
    if (!code) temperature->celsius = (int)gpu->value[TEMPERATURE_C];
    return leave(code);
}

static int clock_field(unsigned kind, int max) { /* 0 graphics, 1 SM, 2 memory, 3 video */
    if (kind == 2) return max ? MAX_MEMORY_CLOCK_MHZ : MEMORY_CLOCK_MHZ;
    return max ? MAX_SM_CLOCK_MHZ : SM_CLOCK_MHZ;
}

int nvmlDeviceGetClockInfo(void *handle, unsigned kind, unsigned *mhz) {
    return number("nvmlDeviceGetClockInfo", handle, clock_field(kind, 0), mhz);
}

int nvmlDeviceGetMaxClockInfo(void *handle, unsigned kind, unsigned *mhz) {
    return number("nvmlDeviceGetMaxClockInfo", handle, clock_field(kind, 1), mhz);
}

int nvmlDeviceGetFanSpeed_v2(void *handle, unsigned fan, unsigned *percent) {
    (void)fan;
    return number("nvmlDeviceGetFanSpeed_v2", handle, FAN, percent);
}

int nvmlDeviceGetPcieThroughput(void *handle, unsigned counter, unsigned *kb) { /* 0 sent, 1 received */
    return number("nvmlDeviceGetPcieThroughput", handle, counter ? PCIE_RX_KB : PCIE_TX_KB, kb);
}

static int large_number(const char *function, void *handle, int field, u64 *target) {
    gpu_t *gpu;
    int code = enter_device(function, handle, &gpu);
    if (!code) *target = (u64)gpu->value[field];
    return leave(code);
}

int nvmlDeviceGetCurrentClocksEventReasons(void *handle, u64 *reasons) {
    return large_number("nvmlDeviceGetCurrentClocksEventReasons", handle, THROTTLE_REASONS, reasons);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, u64 *reasons) {
    return large_number("nvmlDeviceGetCurrentClocksThrottleReasons", handle, THROTTLE_REASONS, reasons);
}

int nvmlDeviceGetTotalEnergyConsumption(void *handle, u64 *millijoules) {
    return large_number("nvmlDeviceGetTotalEnergyConsumption", handle, ENERGY_MJ, millijoules);
}

int nvmlDeviceGetCudaComputeCapability(void *handle, int *major, int *minor) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetCudaComputeCapability", handle, &gpu);
    if (!code) {
        *major = gpu->value[COMPUTE_MAJOR];
        *minor = gpu->value[COMPUTE_MINOR];
    }
    return leave(code);
}

int nvmlDeviceGetMigMode(void *handle, unsigned *current, unsigned *pending) {
    gpu_t *gpu;
    int code = enter_device("nvmlDeviceGetMigMode", handle, &gpu);
    if (!code && gpu->value[MIG] < 0) code = NOT_SUPPORTED;
    if (!code) *current = *pending = gpu->value[MIG];
    return leave(code);
}

/* ---- processes ---- */

typedef struct { unsigned pid; u64 memory; unsigned gpu_instance, compute_instance; } process_t;
_Static_assert(sizeof(process_t) == 24 && sizeof(memory_v2_t) == 0x28, "layouts of nvml.h");

static int processes(const char *function, void *handle, unsigned *count, process_t *entries, int none) {
    gpu_t *gpu;
    int code = enter_device(function, handle, &gpu);
    if (code) return leave(code);
    unsigned room = *count;
    *count = none ? 0 : gpu->processes;
    if (room < *count || (*count && !entries)) return leave(INSUFFICIENT_SIZE);
    for (unsigned i = 0; i < *count; i++)
        entries[i] = (process_t){gpu->pid[i], gpu->memory[i], ~0u, ~0u};
    return leave(SUCCESS);
}

#define PROCESSES(function, none) \
    int function(void *handle, unsigned *count, process_t *entries) { return processes(#function, handle, count, entries, none); }

PROCESSES(nvmlDeviceGetComputeRunningProcesses_v3, 0)
PROCESSES(nvmlDeviceGetComputeRunningProcesses_v2, 0)
PROCESSES(nvmlDeviceGetGraphicsRunningProcesses_v3, 1)
PROCESSES(nvmlDeviceGetMPSComputeRunningProcesses_v3, 1)
