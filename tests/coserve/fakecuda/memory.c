/* Virtual memory: reservations of addresses, handles of memory, mappings of the one to the other, and access to them.
 *
 * Device addresses are host addresses, so that tests and CPU kernels can use what is mapped; what is not accessible faults.
 * The memory of a process is one sparse file in memory, a handle a stretch of it. */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct Handle {
    size_t size;
    off_t offset; /* in the file of this process's memory */
    int references, mappings;
    struct Handle *next;
} Handle;

typedef struct {
    CUdeviceptr address;
    size_t size;
    Handle *handle;
    bool accessible;
} Mapping;

typedef struct Reservation {
    CUdeviceptr address;
    size_t size;
    void *raw;
    size_t raw_size;
    Mapping **granules; /* what is mapped behind each, or NULL */
    struct Reservation *next;
} Reservation;

static Handle *handles;
static Reservation *reservations;
static int file = -1;
static off_t file_end;
static long num_mappings;

static Reservation *reservation_of(CUdeviceptr address, size_t size) {
    for (Reservation *one = reservations; one; one = one->next)
        if (one->address <= address && address + size <= one->address + one->size) return one;
    return NULL;
}

static Mapping **granule(Reservation *range, CUdeviceptr address) {
    return &range->granules[(address - range->address) / GRANULE];
}

static bool whole_granules(CUdeviceptr address, size_t size) {
    return size != 0 && size % GRANULE == 0 && address % GRANULE == 0;
}

/* Number of mappings that make up exactly [address, +size); 0 and why not in ``why``. */
static int whole_mappings(CUdeviceptr address, size_t size, const char **why) {
    Reservation *range = reservation_of(address, size);
    *why = "outside every reservation";
    if (!range) return 0;
    int count = 0;
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *found = *granule(range, at);
        *why = "not mapped everywhere";
        if (!found) return 0;
        *why = "a part of a mapping";
        if (found->address != at || at + found->size > address + size) return 0;
        at += found->size;
        count++;
    }
    return count;
}

static Handle *known(Handle *wanted) {
    Handle *one = handles;
    while (one && one != wanted) one = one->next;
    return one;
}

static void forget_if_unused(Handle *handle) {
    if (handle->references || handle->mappings) return;
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, handle->offset, (off_t)handle->size);
    device_give(handle->size);
    Handle **link = &handles;
    while (*link != handle) link = &(*link)->next;
    *link = handle->next;
    free(handle);
}

static void inaccessible(CUdeviceptr address, size_t size) {
    mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
}

static void drop_mapping(Reservation *range, Mapping *mapping) {
    for (CUdeviceptr at = mapping->address; at < mapping->address + mapping->size; at += GRANULE)
        *granule(range, at) = NULL;
    inaccessible(mapping->address, mapping->size);
    mapping->handle->mappings--;
    forget_if_unused(mapping->handle);
    free(mapping);
    num_mappings--;
}

bool accessible(CUdeviceptr address, size_t size) {
    Reservation *range = reservation_of(address, size);
    if (!range) return false;
    for (CUdeviceptr at = address; at < address + size; at = at / GRANULE * GRANULE + GRANULE) {
        Mapping *found = *granule(range, at);
        if (!found || !found->accessible) return false;
    }
    return true;
}

void memory_write(CUdeviceptr address, size_t size, int value) {
    Reservation *range = reservation_of(address, size);
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *found = *granule(range, at);
        CUdeviceptr end = found->address + found->size < address + size ? found->address + found->size : address + size;
        if (value == 0 && at == found->address && end == found->address + found->size)
            /* Zeros, and no memory for them. */
            fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, found->handle->offset, (off_t)found->size);
        else
            memset((void *)at, value, end - at);
        at = end;
    }
}

long memory_count(const char *what) {
    long count = 0;
    if (!strcmp(what, "mappings")) return num_mappings;
    if (!strcmp(what, "handles"))
        for (Handle *one = handles; one; one = one->next) count++;
    else if (!strcmp(what, "reservations"))
        for (Reservation *one = reservations; one; one = one->next) count++;
    else
        return -1;
    return count;
}

static void free_reservation(Reservation *range) {
    Reservation **link = &reservations;
    while (*link != range) link = &(*link)->next;
    *link = range->next;
    munmap(range->raw, range->raw_size);
    free(range->granules);
    free(range);
}

void memory_reset(void) {
    while (reservations) {
        Reservation *range = reservations;
        for (CUdeviceptr at = range->address; at < range->address + range->size; at += GRANULE)
            if (*granule(range, at)) drop_mapping(range, *granule(range, at));
        free_reservation(range);
    }
    while (handles) {
        handles->references = 0;
        forget_if_unused(handles);
    }
    if (file >= 0) close(file);
    file = -1;
    file_end = 0;
}

/* --- the calls --------------------------------------------------------------------------------- */

static const char *bad_prop(const AllocationProp *prop) {
    if (prop->type != TYPE_PINNED) return "the allocation's type is not PINNED";
    if (prop->location.type != LOCATION_DEVICE || prop->location.id != 0) return "the location is not device 0";
    if (prop->handle_types) return "shareable handles are not offered here";
    return NULL;
}

CUresult cuMemGetAllocationGranularity(size_t *size, const AllocationProp *prop, int option) {
    CALL(NEEDS_INIT);
    const char *why = bad_prop(prop);
    if (why) REFUSE(INVALID_VALUE, "%s", why);
    if (option > GRANULARITY_RECOMMENDED) REFUSE(INVALID_VALUE, "option %d", option);
    *size = GRANULE;
    return SUCCESS;
}

CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr at, unsigned long long flags) {
    CALL(NEEDS_INIT);
    if (!size || size % GRANULE) REFUSE(INVALID_VALUE, "%zu bytes are not whole granules", size);
    if (flags || (alignment & (alignment - 1)) || alignment > GRANULE || at) REFUSE(INVALID_VALUE, "flags, alignment or fixed address");
    /* An inaccessible granule stays on each side. */
    size_t raw_size = size + 3 * GRANULE;
    void *raw = mmap(NULL, raw_size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (raw == MAP_FAILED) return OUT_OF_MEMORY;
    Reservation *range = calloc(1, sizeof *range);
    *range = (Reservation){
        .address = ((uintptr_t)raw + 2 * GRANULE - 1) / GRANULE * GRANULE,
        .size = size,
        .raw = raw,
        .raw_size = raw_size,
        .granules = calloc(size / GRANULE, sizeof(Mapping *)),
        .next = reservations,
    };
    reservations = range;
    *address = range->address;
    return SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    CALL(NEEDS_INIT);
    Reservation *range = reservation_of(address, size);
    if (!range || range->address != address || range->size != size) REFUSE(INVALID_VALUE, "not a whole reservation");
    for (CUdeviceptr at = address; at < address + size; at += GRANULE)
        if (*granule(range, at)) REFUSE(INVALID_VALUE, "still mapped");
    free_reservation(range);
    return SUCCESS;
}

CUresult cuMemCreate(Handle **made, size_t size, const AllocationProp *prop, unsigned long long flags) {
    CALL(NEEDS_INIT);
    const char *why = bad_prop(prop);
    if (why) REFUSE(INVALID_VALUE, "%s", why);
    if (!size || size % GRANULE || flags) REFUSE(INVALID_VALUE, "%zu bytes are not whole granules, or flags", size);
    if (file < 0) file = memfd_create("fakecuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, file_end + (off_t)size) != 0) return OUT_OF_MEMORY;
    if (!device_take(size)) return OUT_OF_MEMORY;
    Handle *handle = calloc(1, sizeof *handle);
    *handle = (Handle){.size = size, .offset = file_end, .references = 1, .next = handles};
    file_end += (off_t)size;
    handles = handle;
    /* Somebody else's bits at the ends of every granule: memory is not zeroed for us. */
    unsigned char dirt[64];
    memset(dirt, 0xAB, sizeof dirt);
    for (off_t at = handle->offset; at < file_end; at += (off_t)GRANULE) {
        if (pwrite(file, dirt, sizeof dirt, at) < 0) return OUT_OF_MEMORY;
        if (pwrite(file, dirt, sizeof dirt, at + (off_t)(GRANULE - sizeof dirt)) < 0) return OUT_OF_MEMORY;
    }
    *made = handle;
    return SUCCESS;
}

CUresult cuMemRelease(Handle *handle) {
    CALL(NEEDS_INIT);
    if (!known(handle) || !handle->references) REFUSE(INVALID_VALUE, "a handle that is unknown or released");
    handle->references--;
    forget_if_unused(handle);
    return SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, Handle *handle, unsigned long long flags) {
    CALL(NEEDS_INIT);
    if (!whole_granules(address, size)) REFUSE(INVALID_VALUE, "not whole granules");
    if (offset || flags) REFUSE(INVALID_VALUE, "offset and flags must be 0");
    if (!known(handle) || !handle->references) REFUSE(INVALID_VALUE, "a handle that is unknown or released");
    if (size > handle->size) REFUSE(INVALID_VALUE, "%zu bytes of a handle of %zu", size, handle->size);
    Reservation *range = reservation_of(address, size);
    if (!range) REFUSE(INVALID_VALUE, "outside every reservation");
    for (CUdeviceptr at = address; at < address + size; at += GRANULE)
        if (*granule(range, at)) REFUSE(INVALID_VALUE, "mapped already");
    void *there = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, file, handle->offset);
    if (there == MAP_FAILED) return OUT_OF_MEMORY;
    Mapping *mapping = malloc(sizeof *mapping);
    *mapping = (Mapping){.address = address, .size = size, .handle = handle};
    for (CUdeviceptr at = address; at < address + size; at += GRANULE) *granule(range, at) = mapping;
    handle->mappings++;
    num_mappings++;
    return SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    CALL(NEEDS_INIT);
    if (!whole_granules(address, size)) REFUSE(INVALID_VALUE, "not whole granules");
    const char *why;
    int count = whole_mappings(address, size, &why);
    if (!count) REFUSE(INVALID_VALUE, "%s", why);
    if (count > 1 && quirks.unmap_one_mapping) return INVALID_VALUE;
    Reservation *range = reservation_of(address, size);
    Mapping *before = NULL;
    for (CUdeviceptr at = address; at < address + size; at += before->size) {
        Mapping *found = *granule(range, at);
        if (before && before->handle == found->handle && quirks.unmap_one_handle) return INVALID_VALUE;
        before = found;
    }
    if (in_use(address, size)) {
        /* What CUDA does with the work is undefined; here it is what one has to expect. */
        stick(ILLEGAL_ADDRESS);
        violation(__func__, ILLEGAL_ADDRESS, "taken away under work in flight");
    }
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *found = *granule(range, at);
        at += found->size;
        drop_mapping(range, found);
    }
    return SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const AccessDesc *access, size_t count) {
    CALL(NEEDS_INIT);
    if (!whole_granules(address, size)) REFUSE(INVALID_VALUE, "not whole granules");
    if (count != 1 || access->location.type != LOCATION_DEVICE || access->location.id != 0) REFUSE(INVALID_VALUE, "not for device 0 alone");
    if (access->flags != ACCESS_READ_WRITE) REFUSE(INVALID_VALUE, "not for reading and writing");
    const char *why;
    int mappings = whole_mappings(address, size, &why);
    if (!mappings) REFUSE(INVALID_VALUE, "%s", why);
    if (mappings > 1 && quirks.access_one_mapping) return INVALID_VALUE;
    Reservation *range = reservation_of(address, size);
    Mapping *before = NULL;
    for (CUdeviceptr at = address; at < address + size; at += before->size) {
        Mapping *found = *granule(range, at);
        if (before && before->handle == found->handle && quirks.access_one_handle) return INVALID_VALUE;
        before = found;
    }
    for (CUdeviceptr at = address; at < address + size;) {
        Mapping *found = *granule(range, at);
        mprotect((void *)found->address, found->size, PROT_READ | PROT_WRITE);
        found->accessible = true;
        at += found->size;
    }
    return SUCCESS;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *all_bytes) {
    CALL(NEEDS_CONTEXT);
    *all_bytes = device_capacity();
    *free_bytes = *all_bytes - device_used();
    return SUCCESS;
}
