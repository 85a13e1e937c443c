/* The way into every call: set-up, the lock, faults that tests ask for, the log of broken rules, and how the library is looked up. */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define CUDA_VERSION 13000

Quirks quirks;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static bool initialised;
static pid_t initialised_by;
static CUresult stuck;
static long num_violations;
static uint64_t random_state;

enum { MAX_CALLS = 96 };
typedef struct {
    char name[48];
    long count;
    double probability; /* of failing */
    long fails_at;      /* the count at which it fails; 0: never */
    CUresult with;
} Call;
static Call calls[MAX_CALLS];

static Call *call_named(const char *name) {
    int i = 0;
    while (i < MAX_CALLS - 1 && calls[i].name[0] && strcmp(calls[i].name, name)) i++;
    snprintf(calls[i].name, sizeof calls[i].name, "%s", name);
    return &calls[i];
}

double chance(void) {
    random_state += 0x9E3779B97F4A7C15u; /* SplitMix64 */
    uint64_t z = random_state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 11) / 9007199254740992.0;
}

CUresult violation(const char *call, CUresult result, const char *format, ...) {
    char line[320];
    int at = snprintf(line, sizeof line, "%d %s: ", (int)getpid(), call);
    va_list arguments;
    va_start(arguments, format);
    at += vsnprintf(line + at, sizeof line - (size_t)at - 1, format, arguments);
    va_end(arguments);
    line[at++] = '\n';
    const char *path = getenv("FAKECUDA_LOG");
    int log = path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : STDERR_FILENO;
    if (write(log, line, (size_t)at) < 0) perror("fakecuda");
    if (path) close(log);
    num_violations++;
    return result;
}

void stick(CUresult result) { stuck = result; }

Entry enter(const char *name, int needs) {
    pthread_mutex_lock(&lock);
    Entry entry = {.result = SUCCESS, .locked = true};
    Call *call = call_named(name);
    call->count++;
    if (needs & NEEDS_INIT) {
        if (!initialised)
            entry.result = NOT_INITIALIZED;
        else if (initialised_by != getpid())
            entry.result = violation(name, NOT_INITIALIZED, "in a process that was forked after cuInit");
        else if (stuck)
            entry.result = stuck;
        else if (needs == NEEDS_CONTEXT && !has_context())
            entry.result = violation(name, INVALID_CONTEXT, "no context is current to this thread");
        else if (call->fails_at == call->count || (call->probability > 0 && chance() < call->probability))
            entry.result = call->with;
    }
    return entry;
}

void leave(Entry *entry) {
    if (entry->locked) pthread_mutex_unlock(&lock);
}

/* ``call=probability:result,...`` */
static void read_faults(const char *text) {
    char name[48];
    double probability;
    int with, length;
    while (text && sscanf(text, "%47[^=]=%lf:%d%n", name, &probability, &with, &length) == 3) {
        Call *call = call_named(name);
        call->probability = probability;
        call->with = with;
        text += length;
        if (*text == ',') text++;
    }
}

static bool asked(const char *quirk) {
    const char *text = getenv("FAKECUDA_QUIRKS");
    return text && strstr(text, quirk);
}

CUresult cuInit(unsigned flags) {
    CALL(NEEDS_NOTHING);
    if (flags) REFUSE(INVALID_VALUE, "flags %u", flags);
    if (initialised) return initialised_by == getpid() ? SUCCESS : NOT_INITIALIZED;
    const char *path = getenv("FAKECUDA_DEVICE"), *pages = getenv("FAKECUDA_PAGES"), *seed = getenv("FAKECUDA_SEED");
    if (!path) return NO_DEVICE; /* not plugged in */
    CUresult result = device_open(path, (pages ? strtoul(pages, NULL, 10) : 64) * GRANULE);
    if (result != SUCCESS) return result;
    random_state = seed ? strtoull(seed, NULL, 10) : 0;
    quirks = (Quirks){
        .access_one_mapping = asked("access-one-mapping"),
        .unmap_one_mapping = asked("unmap-one-mapping"),
        .access_one_handle = asked("access-one-handle"),
        .unmap_one_handle = asked("unmap-one-handle"),
        .any_event = asked("any-event"),
        .no_green = asked("no-green"),
        .held = asked("held"),
    };
    read_faults(getenv("FAKECUDA_FAIL"));
    initialised_by = getpid();
    initialised = true;
    return SUCCESS;
}

CUresult cuDriverGetVersion(int *version) {
    CALL(NEEDS_NOTHING);
    *version = CUDA_VERSION;
    return SUCCESS;
}

CUresult cuGetErrorName(CUresult error, const char **text) {
    static __thread char name[48];
    snprintf(name, sizeof name, "error %d", error);
    *text = name;
    return SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **text) { return cuGetErrorName(error, text); }

/* --- for tests --------------------------------------------------------------------------------- */

/* Take the device out: everything of this process is gone, and the next cuInit starts anew. */
void fakecuda_unplug(void) {
    pthread_mutex_lock(&lock);
    if (initialised) {
        streams_reset();
        memory_reset();
        device_close();
    }
    memset(calls, 0, sizeof calls);
    quirks = (Quirks){0};
    num_violations = 0;
    stuck = SUCCESS;
    initialised = false;
    pthread_mutex_unlock(&lock);
}

/* The call fails: with a probability, and ``from_now`` calls from now (0: not so). */
void fakecuda_fail(const char *name, double probability, long from_now, CUresult with) {
    pthread_mutex_lock(&lock);
    Call *call = call_named(name);
    call->probability = probability;
    call->fails_at = from_now ? call->count + from_now : 0;
    call->with = with;
    pthread_mutex_unlock(&lock);
}

/* While held the device does no work but what is waited for. */
void fakecuda_hold(int held) {
    pthread_mutex_lock(&lock);
    quirks.held = held;
    pthread_mutex_unlock(&lock);
}

/* How often a call was made; or how many there are of ``handles``, ``mappings``, ``reservations``, ``streams``, ``events``,
 * ``green_contexts``; ``violations`` of this process; ``used`` bytes of the device, by all processes. */
long fakecuda_count(const char *what) {
    pthread_mutex_lock(&lock);
    long count;
    if (!strcmp(what, "violations"))
        count = num_violations;
    else if (!strcmp(what, "used"))
        count = initialised ? (long)device_used() : 0;
    else if ((count = memory_count(what)) < 0 && (count = streams_count(what)) < 0)
        count = call_named(what)->count;
    pthread_mutex_unlock(&lock);
    return count;
}

/* --- how callers find the calls ---------------------------------------------------------------- */

#define EACH_CALL(DO) \
    DO(cuInit) DO(cuDriverGetVersion) DO(cuGetErrorName) DO(cuGetErrorString) DO(cuGetProcAddress) \
    DO(cuDeviceGet) DO(cuDeviceGetCount) DO(cuDevicePrimaryCtxRetain) DO(cuDevicePrimaryCtxRelease) \
    DO(cuCtxSetCurrent) DO(cuCtxGetCurrent) DO(cuCtxSynchronize) DO(cuCtxFromGreenCtx) \
    DO(cuMemGetAllocationGranularity) DO(cuMemAddressReserve) DO(cuMemAddressFree) DO(cuMemCreate) DO(cuMemRelease) \
    DO(cuMemMap) DO(cuMemUnmap) DO(cuMemSetAccess) DO(cuMemGetInfo) DO(cuMemsetD8Async) DO(cuMemcpyDtoH) \
    DO(cuStreamCreate) DO(cuStreamDestroy) DO(cuStreamSynchronize) DO(cuStreamQuery) DO(cuStreamGetCtx) \
    DO(cuEventCreate) DO(cuEventRecord) DO(cuEventQuery) DO(cuEventSynchronize) DO(cuEventDestroy) \
    DO(cuDeviceGetDevResource) DO(cuDevSmResourceSplitByCount) DO(cuDevResourceGenerateDesc) \
    DO(cuGreenCtxCreate) DO(cuGreenCtxDestroy) DO(cuGreenCtxStreamCreate)

#define DECLARE(name) extern void name##_(void) __asm__(#name);
EACH_CALL(DECLARE)
#define ROW(name) {#name, name##_},
static const struct { const char *name; void (*function)(void); } table[] = {EACH_CALL(ROW)};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags, int *status) {
    (void)version, (void)flags;
    *function = NULL;
    for (size_t i = 0; i < sizeof table / sizeof *table && !*function; i++)
        if (!strcmp(table[i].name, name)) *function = (void *)table[i].function;
    /* Callers that look this one up want the signature of its second version. */
    if (!strcmp(name, "cuGetProcAddress")) *function = (void *)cuGetProcAddress_v2;
    if (status) *status = *function ? 0 : 1;
    return *function ? SUCCESS : NOT_FOUND;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, function, version, flags, NULL);
}
