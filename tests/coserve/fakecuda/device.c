/* The device's memory: how much of it each process holds, in one file that all of them map.
 *
 * A process holds a record lock on the byte of its slot for as long as it lives; the kernel lets go of it however the process
 * ends, and the next who looks counts its memory as free.  (Such locks are lost when the process closes any descriptor of the
 * file: nobody else may open it.) */
#define _GNU_SOURCE
#include "fakecuda.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

enum { NUM_SLOTS = 256, TABLE_LOCK = 1 << 20, FIRST_SLOT_LOCK = TABLE_LOCK + 1 };

typedef struct {
    size_t capacity;
    struct { int taken; size_t used; } slots[NUM_SLOTS];
} Table;

static int file = -1;
static Table *table;
static int slot;

static int lock_byte(int command, int type, off_t byte, int *holder) {
    struct flock lock = {.l_type = (short)type, .l_whence = SEEK_SET, .l_start = byte, .l_len = 1};
    int done = fcntl(file, command, &lock);
    if (holder) *holder = lock.l_type;
    return done;
}

static void lock_table(void) { lock_byte(F_SETLKW, F_WRLCK, TABLE_LOCK, NULL); }
static void unlock_table(void) { lock_byte(F_SETLK, F_UNLCK, TABLE_LOCK, NULL); }

/* Slots of processes that are gone are free. The table is locked. */
static void reap(void) {
    for (int i = 0; i < NUM_SLOTS; i++) {
        if (!table->slots[i].taken || i == slot) continue;
        int held_as = F_WRLCK;
        if (lock_byte(F_GETLK, F_WRLCK, FIRST_SLOT_LOCK + i, &held_as) == 0 && held_as == F_UNLCK) {
            table->slots[i].taken = 0;
            table->slots[i].used = 0;
        }
    }
}

static size_t total(void) {
    size_t used = 0;
    for (int i = 0; i < NUM_SLOTS; i++)
        if (table->slots[i].taken) used += table->slots[i].used;
    return used;
}

CUresult device_open(const char *path, size_t capacity) {
    file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0 || ftruncate(file, sizeof(Table)) != 0) return NO_DEVICE;
    table = mmap(NULL, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (table == MAP_FAILED) return NO_DEVICE;
    slot = -1;
    lock_table();
    if (table->capacity == 0) table->capacity = capacity;
    reap();
    for (int i = 0; i < NUM_SLOTS && slot < 0; i++)
        if (!table->slots[i].taken) slot = i;
    if (slot >= 0) {
        lock_byte(F_SETLK, F_WRLCK, FIRST_SLOT_LOCK + slot, NULL);
        table->slots[slot].taken = 1;
        table->slots[slot].used = 0;
    }
    unlock_table();
    return slot < 0 ? NO_DEVICE : SUCCESS;
}

void device_close(void) {
    if (file < 0) return;
    lock_table();
    table->slots[slot].taken = 0;
    table->slots[slot].used = 0;
    unlock_table();
    munmap(table, sizeof(Table));
    close(file);
    file = -1;
}

bool device_take(size_t size) {
    lock_table();
    reap();
    bool fits = total() + size <= table->capacity;
    if (fits) table->slots[slot].used += size;
    unlock_table();
    return fits;
}

void device_give(size_t size) {
    lock_table();
    table->slots[slot].used -= size;
    unlock_table();
}

size_t device_used(void) {
    lock_table();
    reap();
    size_t used = total();
    unlock_table();
    return used;
}

size_t device_capacity(void) { return table->capacity; }
