/* Contexts (one current to each thread), streams with work queued on them, events, green contexts.
 *
 * Work is done when somebody waits for it, or bit by bit when somebody asks whether it is done: then each stream does its next
 * piece with a chance of one half, in a seeded order.  Between streams there is no order but that of the legacy default stream. */
#include "fakecuda.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

typedef struct Green Green;
typedef struct Context {
    Green *green; /* NULL: the primary context */
    bool held;    /* a green one is current to one thread at a time: this one */
    pthread_t holder;
} Context;
struct Green { Context context; unsigned num_sms; Green *next; };

typedef struct Work {
    CUdeviceptr address;
    size_t size;
    int value;
    struct Work *next;
} Work;

typedef struct Stream {
    Context *context;
    Work *first, **last;
    long queued, done;
    bool blocking; /* ordered with the legacy default stream */
    struct Stream *next;
} Stream;

typedef struct Event {
    Context *context;
    Stream *stream; /* NULL: never recorded */
    long behind;
    struct Event *next;
} Event;

static Context primary;
static long primary_retained;
static Stream legacy = {.context = &primary, .last = &legacy.first, .blocking = true};
static Stream *streams = &legacy; /* the legacy stream is always the last */
static Event *events;
static Green *greens;
static long generation; /* of the device: a context that was current to a thread before is none of this one's */

static __thread struct { Context *context; long generation; } current;

bool has_context(void) { return current.context && current.generation == generation; }

static Stream *find_stream(Stream *wanted) {
    if (!wanted) return &legacy;
    Stream *one = streams;
    while (one && one != wanted) one = one->next;
    return one;
}

static Event *find_event(Event *wanted) {
    Event *one = events;
    while (one && one != wanted) one = one->next;
    return one;
}

static void queue(Stream *stream, CUdeviceptr address, size_t size, int value) {
    Work *work = malloc(sizeof *work);
    *work = (Work){.address = address, .size = size, .value = value};
    *stream->last = work;
    stream->last = &work->next;
    stream->queued++;
}

static CUresult do_next(Stream *stream) {
    Work *work = stream->first;
    if (!accessible(work->address, work->size)) {
        stick(ILLEGAL_ADDRESS);
        return violation("kernel", ILLEGAL_ADDRESS, "writes where no memory is accessible");
    }
    memory_write(work->address, work->size, work->value);
    stream->first = work->next;
    if (!stream->first) stream->last = &stream->first;
    free(work);
    stream->done++;
    return SUCCESS;
}

static CUresult finish(Stream *stream) {
    CUresult result = SUCCESS;
    while (stream->first && result == SUCCESS) result = do_next(stream);
    return result;
}

static CUresult some_progress(void) {
    CUresult result = SUCCESS;
    if (quirks.held) return SUCCESS;
    for (Stream *one = streams; one && result == SUCCESS; one = one->next)
        if (one->first && chance() < 0.5) result = do_next(one);
    return result;
}

bool in_use(CUdeviceptr address, size_t size) {
    for (Stream *one = streams; one; one = one->next)
        for (Work *work = one->first; work; work = work->next)
            if (work->address < address + size && address < work->address + work->size) return true;
    return false;
}

static void drop_stream(Stream *stream) {
    while (stream->first) {
        Work *work = stream->first;
        stream->first = work->next;
        free(work);
    }
    if (stream == &legacy) {
        legacy = (Stream){.context = &primary, .last = &legacy.first, .blocking = true};
        return;
    }
    Stream **link = &streams;
    while (*link != stream) link = &(*link)->next;
    *link = stream->next;
    for (Event *one = events; one; one = one->next)
        if (one->stream == stream) one->stream = NULL; /* all of it was done */
    free(stream);
}

void streams_reset(void) {
    while (streams != &legacy) drop_stream(streams);
    drop_stream(&legacy);
    while (events) {
        Event *event = events;
        events = event->next;
        free(event);
    }
    while (greens) {
        Green *green = greens;
        greens = green->next;
        free(green);
    }
    primary_retained = 0;
    generation++;
}

long streams_count(const char *what) {
    long count = 0;
    if (!strcmp(what, "events"))
        for (Event *one = events; one; one = one->next) count++;
    else if (!strcmp(what, "streams"))
        for (Stream *one = streams; one != &legacy; one = one->next) count++;
    else if (!strcmp(what, "green_contexts"))
        for (Green *one = greens; one; one = one->next) count++;
    else
        return -1;
    return count;
}

/* --- contexts ---------------------------------------------------------------------------------- */

CUresult cuDeviceGet(int *device, int number) {
    CALL(NEEDS_INIT);
    if (number != 0) return INVALID_DEVICE;
    *device = 0;
    return SUCCESS;
}

CUresult cuDeviceGetCount(int *count) {
    CALL(NEEDS_INIT);
    *count = 1;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRetain(Context **context, int device) {
    CALL(NEEDS_INIT);
    if (device != 0) REFUSE(INVALID_DEVICE, "device %d", device);
    primary_retained++;
    *context = &primary;
    return SUCCESS;
}

CUresult cuDevicePrimaryCtxRelease(int device) {
    CALL(NEEDS_INIT);
    if (device != 0 || primary_retained == 0) REFUSE(INVALID_CONTEXT, "not retained");
    primary_retained--;
    return SUCCESS;
}

CUresult cuCtxSetCurrent(Context *context) {
    CALL(NEEDS_INIT);
    bool known = !context || (context == &primary && primary_retained);
    for (Green *one = greens; one && !known; one = one->next) known = context == &one->context;
    if (!known) REFUSE(INVALID_CONTEXT, "a context that is unknown or not retained");
    if (context && context->green && context->held && !pthread_equal(context->holder, pthread_self()))
        REFUSE(INVALID_CONTEXT, "a green context that is current to another thread");
    if (has_context() && current.context->green) current.context->held = false;
    if (context && context->green) {
        context->held = true;
        context->holder = pthread_self();
    }
    current.context = context;
    current.generation = generation;
    return SUCCESS;
}

CUresult cuCtxGetCurrent(Context **context) {
    CALL(NEEDS_INIT);
    *context = has_context() ? current.context : NULL;
    return SUCCESS;
}

/* --- streams ----------------------------------------------------------------------------------- */

static Stream *make_stream(Context *context, unsigned flags) {
    Stream *stream = calloc(1, sizeof *stream);
    *stream = (Stream){.context = context, .last = &stream->first, .blocking = !(flags & STREAM_NON_BLOCKING), .next = streams};
    return streams = stream;
}

CUresult cuStreamCreate(Stream **stream, unsigned flags) {
    CALL(NEEDS_CONTEXT);
    if (flags & ~(unsigned)STREAM_NON_BLOCKING) REFUSE(INVALID_VALUE, "flags %u", flags);
    *stream = make_stream(current.context, flags);
    return SUCCESS;
}

CUresult cuStreamDestroy(Stream *stream) {
    CALL(NEEDS_CONTEXT);
    if (!stream || !find_stream(stream)) REFUSE(INVALID_HANDLE, "an unknown stream");
    CUresult result = finish(stream);
    drop_stream(stream);
    return result;
}

CUresult cuStreamSynchronize(Stream *stream) {
    CALL(NEEDS_CONTEXT);
    stream = find_stream(stream);
    if (!stream) REFUSE(INVALID_HANDLE, "an unknown stream");
    return finish(stream);
}

CUresult cuStreamQuery(Stream *stream) {
    CALL(NEEDS_CONTEXT);
    stream = find_stream(stream);
    if (!stream) REFUSE(INVALID_HANDLE, "an unknown stream");
    CUresult result = some_progress();
    return result != SUCCESS ? result : stream->first ? NOT_READY : SUCCESS;
}

CUresult cuStreamGetCtx(Stream *stream, Context **context) {
    CALL(NEEDS_CONTEXT);
    if (!stream) {
        *context = current.context;
        return SUCCESS;
    }
    stream = find_stream(stream);
    if (!stream) REFUSE(INVALID_HANDLE, "an unknown stream");
    *context = stream->context;
    return SUCCESS;
}

CUresult cuCtxSynchronize(void) {
    CALL(NEEDS_CONTEXT);
    CUresult result = SUCCESS;
    for (Stream *one = streams; one && result == SUCCESS; one = one->next)
        if (one->context == current.context || current.context == &primary) result = finish(one);
    return result;
}

CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t count, Stream *stream) {
    CALL(NEEDS_CONTEXT);
    stream = find_stream(stream);
    if (!stream) REFUSE(INVALID_HANDLE, "an unknown stream");
    if (!accessible(address, count)) REFUSE(INVALID_VALUE, "no accessible memory");
    queue(stream, address, count, value);
    return SUCCESS;
}

CUresult cuMemcpyDtoH(void *to, CUdeviceptr address, size_t count) {
    CALL(NEEDS_CONTEXT);
    CUresult result = SUCCESS;
    for (Stream *one = streams; one && result == SUCCESS; one = one->next)
        if (one->blocking) result = finish(one); /* a stream that does not block may still be at work there */
    if (result != SUCCESS) return result;
    if (!accessible(address, count)) REFUSE(INVALID_VALUE, "no accessible memory");
    memcpy(to, (void *)address, count);
    return SUCCESS;
}

/* --- events ------------------------------------------------------------------------------------ */

CUresult cuEventCreate(Event **event, unsigned flags) {
    CALL(NEEDS_CONTEXT);
    if (flags & ~(unsigned)EVENT_FLAGS) REFUSE(INVALID_VALUE, "flags %u", flags);
    Event *made = calloc(1, sizeof *made);
    *made = (Event){.context = current.context, .next = events};
    *event = events = made;
    return SUCCESS;
}

CUresult cuEventRecord(Event *event, Stream *stream) {
    CALL(NEEDS_CONTEXT);
    stream = find_stream(stream);
    if (!find_event(event) || !stream) REFUSE(INVALID_HANDLE, "an unknown event or stream");
    /* Documented, and not seen on a device: whoever is refused may try in another way, so this is no broken rule. */
    if (event->context != stream->context && !quirks.any_event) return INVALID_HANDLE;
    event->stream = stream;
    event->behind = stream->queued;
    return SUCCESS;
}

CUresult cuEventQuery(Event *event) {
    CALL(NEEDS_CONTEXT);
    if (!find_event(event)) REFUSE(INVALID_HANDLE, "an unknown event");
    CUresult result = some_progress();
    if (result != SUCCESS) return result;
    return !event->stream || event->stream->done >= event->behind ? SUCCESS : NOT_READY;
}

CUresult cuEventSynchronize(Event *event) {
    CALL(NEEDS_CONTEXT);
    if (!find_event(event)) REFUSE(INVALID_HANDLE, "an unknown event");
    CUresult result = SUCCESS;
    while (event->stream && event->stream->done < event->behind && result == SUCCESS) result = do_next(event->stream);
    return result;
}

CUresult cuEventDestroy(Event *event) {
    CALL(NEEDS_CONTEXT);
    if (!find_event(event)) REFUSE(INVALID_HANDLE, "an unknown event");
    Event **link = &events;
    while (*link != event) link = &(*link)->next;
    *link = event->next;
    free(event);
    return SUCCESS;
}

/* --- green contexts ---------------------------------------------------------------------------- */

CUresult cuDeviceGetDevResource(int device, Resource *resource, int type) {
    CALL(NEEDS_INIT);
    if (quirks.no_green) return NOT_SUPPORTED;
    if (device != 0 || type != RESOURCE_SM) REFUSE(INVALID_VALUE, "device %d, type %d", device, type);
    memset(resource, 0, sizeof *resource);
    resource->type = RESOURCE_SM;
    resource->sm.count = NUM_SMS;
    resource->sm.least = resource->sm.step = SM_STEP;
    return SUCCESS;
}

CUresult cuDevSmResourceSplitByCount(Resource *groups, unsigned *num_groups, const Resource *whole, Resource *rest, unsigned flags, unsigned least) {
    CALL(NEEDS_INIT);
    if (whole->type != RESOURCE_SM || flags) REFUSE(INVALID_VALUE, "not SMs, or flags");
    unsigned each = (least + SM_STEP - 1) / SM_STEP * SM_STEP;
    if (each < SM_STEP) each = SM_STEP;
    unsigned most = whole->sm.count / each;
    if (!groups) {
        *num_groups = most;
        return SUCCESS;
    }
    if (*num_groups > most) *num_groups = most;
    for (unsigned i = 0; i < *num_groups; i++) {
        groups[i] = *whole;
        groups[i].sm.count = each;
    }
    if (rest) {
        *rest = *whole;
        rest->sm.count = whole->sm.count - *num_groups * each;
    }
    return SUCCESS;
}

CUresult cuDevResourceGenerateDesc(void **description, Resource *resources, unsigned count) {
    CALL(NEEDS_INIT);
    if (count != 1 || resources->type != RESOURCE_SM) REFUSE(INVALID_VALUE, "not one group of SMs");
    *description = (void *)(uintptr_t)resources->sm.count;
    return SUCCESS;
}

CUresult cuGreenCtxCreate(Green **green, void *description, int device, unsigned flags) {
    CALL(NEEDS_INIT);
    if (quirks.no_green) return NOT_SUPPORTED;
    if (!description || device != 0) REFUSE(INVALID_VALUE, "no description, or device %d", device);
    if (flags != GREEN_DEFAULT_STREAM) REFUSE(INVALID_VALUE, "CU_GREEN_CTX_DEFAULT_STREAM must be asked for");
    Green *made = calloc(1, sizeof *made);
    *made = (Green){.context = {.green = made}, .num_sms = (unsigned)(uintptr_t)description, .next = greens};
    *green = greens = made;
    return SUCCESS;
}

static Green *find_green(Green *wanted) {
    Green *one = greens;
    while (one && one != wanted) one = one->next;
    return one;
}

CUresult cuGreenCtxStreamCreate(Stream **stream, Green *green, unsigned flags, int priority) {
    CALL(NEEDS_INIT);
    (void)priority;
    if (!find_green(green)) REFUSE(INVALID_HANDLE, "an unknown green context");
    if (flags != STREAM_NON_BLOCKING) REFUSE(INVALID_VALUE, "CU_STREAM_NON_BLOCKING must be asked for");
    *stream = make_stream(&green->context, flags);
    return SUCCESS;
}

CUresult cuCtxFromGreenCtx(Context **context, Green *green) {
    CALL(NEEDS_INIT);
    if (!find_green(green)) REFUSE(INVALID_HANDLE, "an unknown green context");
    *context = &green->context;
    return SUCCESS;
}

CUresult cuGreenCtxDestroy(Green *green) {
    CALL(NEEDS_INIT);
    if (!find_green(green)) REFUSE(INVALID_HANDLE, "an unknown green context");
    for (Stream *one = streams; one != &legacy; one = one->next)
        if (one->context == &green->context) REFUSE(INVALID_VALUE, "its streams are there still");
    Green **link = &greens;
    while (*link != green) link = &(*link)->next;
    *link = green->next;
    free(green);
    return SUCCESS;
}

/* --- for tests --------------------------------------------------------------------------------- */

/* A kernel that writes ``value`` when it runs, like any other one unordered with the calls that move memory. */
CUresult fakecuda_kernel(Stream *stream, CUdeviceptr address, size_t size, int value) {
    CALL(NEEDS_INIT);
    stream = find_stream(stream);
    if (!stream) REFUSE(INVALID_HANDLE, "an unknown stream");
    queue(stream, address, size, value);
    return SUCCESS;
}
