/* A stand-in for CUDA's driver library: what its files share.  What it is and what it checks: README.md in this folder. */
#ifndef FAKECUDA_H
#define FAKECUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef int CUresult;
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    NOT_SUPPORTED = 801,
};

/* Structures and numbers of cuda.h that callers pass, as cuda-bindings 13 lays them out. */
typedef uintptr_t CUdeviceptr;
typedef struct { int type, id; } Location;
typedef struct {
    int type, handle_types;
    Location location;
    void *win32;
    unsigned char flags[8];
} AllocationProp;
typedef struct { Location location; int flags; } AccessDesc;
typedef struct Resource {
    int type;
    unsigned char padding[92];
    struct { unsigned count, least, step, flags; } sm;
    unsigned char rest[24];
    struct Resource *next;
} Resource;
enum { TYPE_PINNED = 1, LOCATION_DEVICE = 1, ACCESS_READ_WRITE = 3, RESOURCE_SM = 1 };
enum { STREAM_NON_BLOCKING = 1, EVENT_FLAGS = 7, GREEN_DEFAULT_STREAM = 1, GRANULARITY_RECOMMENDED = 1 };

#define GRANULE ((size_t)2 << 20)
#define NUM_SMS 132
#define SM_STEP 8

/* --- entry.c: every call begins with CALL(what it needs); the lock is held until it returns ---- */

enum { NEEDS_NOTHING = 0, NEEDS_INIT = 1, NEEDS_CONTEXT = 3 };
typedef struct { CUresult result; bool locked; } Entry;
Entry enter(const char *call, int needs);
void leave(Entry *entry);
#define CALL(needs) \
    Entry entry __attribute__((cleanup(leave))) = enter(__func__, needs); \
    if (entry.result != SUCCESS) return entry.result

/* Write down that a rule was broken, and say which; the result is handed through. */
CUresult violation(const char *call, CUresult result, const char *format, ...) __attribute__((format(printf, 3, 4)));
#define REFUSE(result, ...) return violation(__func__, result, __VA_ARGS__)
/* From here on every call fails with this: what a fault in a kernel does to a process. */
void stick(CUresult result);
double chance(void); /* the next of a seeded sequence, in [0, 1) */

typedef struct {
    bool access_one_mapping; /* an access call may span one mapping only */
    bool unmap_one_mapping;  /* the same of an unmap */
    bool access_one_handle;  /* nor may it span several mappings of one handle */
    bool unmap_one_handle;   /* nor may an unmap */
    bool any_event;          /* events may be recorded on streams of other contexts */
    bool no_green;           /* no green contexts */
    bool held;               /* the device does nothing until it is waited for */
} Quirks;
extern Quirks quirks;

/* --- device.c: the memory of the device, shared by all processes ------------------------------ */

CUresult device_open(const char *path, size_t capacity);
void device_close(void);
bool device_take(size_t size); /* false: there is not so much */
void device_give(size_t size);
size_t device_used(void); /* by all living processes */
size_t device_capacity(void);

/* --- memory.c ---------------------------------------------------------------------------------- */

/* Can a kernel read and write all of it? */
bool accessible(CUdeviceptr address, size_t size);
void memory_write(CUdeviceptr address, size_t size, int value);
void memory_reset(void);
long memory_count(const char *what);

/* --- streams.c --------------------------------------------------------------------------------- */

bool has_context(void);
/* Is work queued that touches any of it? */
bool in_use(CUdeviceptr address, size_t size);
void streams_reset(void);
long streams_count(const char *what);

#endif
