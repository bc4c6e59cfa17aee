/* Counts of device calls, and the names of kernels. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>

#include "null_cuda.h"

typedef void (*listener)(int kind, const char *detail);

EXPORT long null_cuda_counts[NUM_EVENT_KINDS];
static listener current_listener = NULL;
static long step = 0;

/* Call `new_listener` at each event, on the thread of the event. NULL removes the listener. */
EXPORT void null_cuda_listen(listener new_listener) { current_listener = new_listener; }

/* Set the number of the training step that starts. */
EXPORT void null_cuda_start_step(long number) { step = number; }

long current_step(void) { return step; }

void record_event(enum event_kind kind, const char *detail) {
    __atomic_fetch_add(&null_cuda_counts[kind], 1, __ATOMIC_RELAXED);
    listener call = current_listener;
    if (call != NULL) call(kind, detail);
}

/* ---- kernel names: nvcc's startup code registers each host function with its mangled device name */

struct kernel {
    const void *host_function;
    const char *name;
};
static struct kernel *kernels = NULL; /* open addressing; the capacity is a power of two */
static size_t num_kernels = 0;
static size_t capacity = 0;
static pthread_mutex_t kernels_lock = PTHREAD_MUTEX_INITIALIZER;

static struct kernel *slot_of(struct kernel *table, size_t size, const void *host_function) {
    size_t index = ((uintptr_t)host_function >> 4) * 0x9E3779B97F4A7C15ul & (size - 1);
    while (table[index].host_function != NULL && table[index].host_function != host_function)
        index = (index + 1) & (size - 1);
    return &table[index];
}

static void grow(void) {
    size_t larger = capacity ? 2 * capacity : 1 << 16;
    struct kernel *table = calloc(larger, sizeof *table);
    for (size_t i = 0; i < capacity; i++)
        if (kernels[i].host_function != NULL) *slot_of(table, larger, kernels[i].host_function) = kernels[i];
    free(kernels);
    kernels = table;
    capacity = larger;
}

EXPORT void __cudaRegisterFunction(void **module, const char *host_function, char *device_function, const char *name,
                                   int thread_limit, void *tid, void *bid, void *block, void *grid, int *warp_size) {
    pthread_mutex_lock(&kernels_lock);
    if (2 * (num_kernels + 1) > capacity) grow();
    *slot_of(kernels, capacity, host_function) = (struct kernel){host_function, name};
    num_kernels++;
    pthread_mutex_unlock(&kernels_lock);
}

const char *kernel_name(const void *host_function) {
    pthread_mutex_lock(&kernels_lock);
    const char *name = capacity ? slot_of(kernels, capacity, host_function)->name : NULL;
    pthread_mutex_unlock(&kernels_lock);
    return name != NULL ? name : "unregistered kernel";
}

void *new_handle(void) { return calloc(1, 256); }
