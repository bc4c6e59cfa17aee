/* Memory. Each device has a range of addresses without read and write access, because the host must not access device
 * memory. Addresses are never reused; the ranges are large enough for all tests.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "null_cuda.h"

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2 };

#define MAX_DEVICES 16
#define RANGE_BYTES (1ul << 42)        /* addresses of one device: 4 TiB */
#define GRANULARITY (2ul << 20)        /* of virtual-memory allocations */
#define DEFAULT_GIB 79.18              /* an H100's memory; NULL_CUDA_MEMORY_GIB overrides it */
#define CONTEXT_BYTES (600ul << 20)    /* used by CUDA itself */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uintptr_t ranges = 0;            /* start of the ranges of all devices */
static size_t next_offset[MAX_DEVICES]; /* of the next allocation within a device's range */
static size_t used_bytes[MAX_DEVICES];
static __thread int device = 0;

struct block {
    uintptr_t start;
    size_t num_bytes;
    struct block *next;
};
static struct block *device_blocks = NULL;
static struct block *pinned_blocks = NULL;

int current_device(void) { return device; }

size_t total_memory(void) {
    const char *gib = getenv("NULL_CUDA_MEMORY_GIB");
    return (size_t)((gib != NULL ? atof(gib) : DEFAULT_GIB) * (1ul << 30));
}

size_t free_memory(void) { return total_memory() - CONTEXT_BYTES - used_bytes[device]; }

int num_devices(void) {
    const char *number = getenv("NULL_CUDA_DEVICES");
    return number != NULL ? atoi(number) : 8;
}

EXPORT int cudaSetDevice(int index) {
    device = index;
    return SUCCESS;
}

EXPORT int cudaGetDevice(int *index) {
    *index = device;
    return SUCCESS;
}

static void add_block(struct block **list, uintptr_t start, size_t num_bytes) {
    struct block *added = malloc(sizeof *added);
    *added = (struct block){start, num_bytes, *list};
    *list = added;
}

static size_t remove_block(struct block **list, uintptr_t start) {
    for (struct block **link = list; *link != NULL; link = &(*link)->next) {
        struct block *found = *link;
        if (found->start != start) continue;
        size_t num_bytes = found->num_bytes;
        *link = found->next;
        free(found);
        return num_bytes;
    }
    return 0;
}

/* Reserve addresses on the current device. The caller holds the lock. */
static uintptr_t take_addresses(size_t num_bytes) {
    if (ranges == 0) {
        void *start = mmap(NULL, MAX_DEVICES * RANGE_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (start == MAP_FAILED) abort();
        ranges = (uintptr_t)start;
    }
    size_t rounded = (num_bytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
    uintptr_t start = ranges + device * RANGE_BYTES + next_offset[device];
    next_offset[device] += rounded + GRANULARITY;
    if (next_offset[device] > RANGE_BYTES) abort();
    return start;
}

struct location find_location(const void *address) {
    uintptr_t value = (uintptr_t)address;
    if (ranges != 0 && value >= ranges && value < ranges + MAX_DEVICES * RANGE_BYTES)
        return (struct location){DEVICE, (int)((value - ranges) / RANGE_BYTES)};
    struct location result = {PAGEABLE, -1};
    pthread_mutex_lock(&lock);
    for (struct block *block = pinned_blocks; block != NULL; block = block->next)
        if (value >= block->start && value < block->start + block->num_bytes) {
            result = (struct location){PINNED, device};
            break;
        }
    pthread_mutex_unlock(&lock);
    return result;
}

/* ---- device memory */

EXPORT int cudaMalloc(void **address, size_t num_bytes) {
    record_event(DEVICE_ALLOCATION, "cudaMalloc");
    pthread_mutex_lock(&lock);
    int is_enough = num_bytes <= free_memory();
    if (is_enough) {
        uintptr_t start = take_addresses(num_bytes);
        add_block(&device_blocks, start, num_bytes);
        used_bytes[device] += num_bytes;
        *address = (void *)start;
    }
    pthread_mutex_unlock(&lock);
    return is_enough ? SUCCESS : OUT_OF_MEMORY;
}

EXPORT int cudaFree(void *address) {
    if (address == NULL) return SUCCESS;
    pthread_mutex_lock(&lock);
    size_t num_bytes = remove_block(&device_blocks, (uintptr_t)address);
    used_bytes[((uintptr_t)address - ranges) / RANGE_BYTES] -= num_bytes;
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT int ncclMemAlloc(void **address, size_t num_bytes) { return cudaMalloc(address, num_bytes); }
EXPORT int ncclMemFree(void *address) { return cudaFree(address); }

EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    *free_bytes = free_memory();
    *total_bytes = total_memory();
    return SUCCESS;
}

/* ---- virtual memory (expandable segments): handles carry the device and the size */

struct physical {
    size_t num_bytes;
    int device;
};

EXPORT int cuMemAddressReserve(uintptr_t *address, size_t num_bytes, size_t alignment, uintptr_t hint, uint64_t flags) {
    pthread_mutex_lock(&lock);
    *address = take_addresses(num_bytes);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT int cuMemCreate(uint64_t *handle, size_t num_bytes, const void *properties, uint64_t flags) {
    record_event(DEVICE_ALLOCATION, "cuMemCreate");
    if (num_bytes > free_memory()) return OUT_OF_MEMORY;
    struct physical *memory = malloc(sizeof *memory);
    *memory = (struct physical){num_bytes, device};
    __atomic_fetch_add(&used_bytes[device], num_bytes, __ATOMIC_RELAXED);
    *handle = (uint64_t)(uintptr_t)memory;
    return SUCCESS;
}

EXPORT int cuMemRelease(uint64_t handle) {
    struct physical *memory = (struct physical *)(uintptr_t)handle;
    __atomic_fetch_sub(&used_bytes[memory->device], memory->num_bytes, __ATOMIC_RELAXED);
    free(memory);
    return SUCCESS;
}

EXPORT int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    *bytes = GRANULARITY;
    return SUCCESS;
}

ACCEPT(cuMemAddressFree)
ACCEPT(cuMemMap)
ACCEPT(cuMemUnmap)
ACCEPT(cuMemSetAccess)
ACCEPT(cuMemGetHandleForAddressRange)

/* ---- pinned host memory */

EXPORT int cudaHostAlloc(void **address, size_t num_bytes, unsigned flags) {
    record_event(PINNED_ALLOCATION, "cudaHostAlloc");
    void *start = mmap(NULL, num_bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    pthread_mutex_lock(&lock);
    add_block(&pinned_blocks, (uintptr_t)start, num_bytes + 1);
    pthread_mutex_unlock(&lock);
    *address = start;
    return SUCCESS;
}

EXPORT int cudaFreeHost(void *address) {
    pthread_mutex_lock(&lock);
    size_t num_bytes = remove_block(&pinned_blocks, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    if (num_bytes > 0) munmap(address, num_bytes);
    return SUCCESS;
}

EXPORT int cudaHostRegister(void *address, size_t num_bytes, unsigned flags) {
    pthread_mutex_lock(&lock);
    add_block(&pinned_blocks, (uintptr_t)address, num_bytes);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT int cudaHostUnregister(void *address) {
    pthread_mutex_lock(&lock);
    remove_block(&pinned_blocks, (uintptr_t)address);
    pthread_mutex_unlock(&lock);
    return SUCCESS;
}

EXPORT int cudaHostGetDevicePointer(void **on_device, void *on_host, unsigned flags) {
    *on_device = on_host;
    return SUCCESS;
}

/* ---- copies: the host receives zeros; device memory is never written */

static void copy(void *target, const void *source, size_t num_bytes) {
    if (find_location(target).kind == DEVICE) return;
    if (find_location(source).kind == DEVICE)
        memset(target, 0, num_bytes);
    else
        memmove(target, source, num_bytes);
}

EXPORT int cudaMemcpy(void *target, const void *source, size_t num_bytes, int direction) {
    if (is_any_capturing()) return CAPTURE_UNSUPPORTED;
    record_event(COPY, "cudaMemcpy");
    record_event(SYNC, "cudaMemcpy");
    copy(target, source, num_bytes);
    return SUCCESS;
}

/* CUDA stages copies of pageable memory, so the call returns after all earlier work of the stream. */
EXPORT int cudaMemcpyAsync(void *target, const void *source, size_t num_bytes, int direction, void *stream) {
    enum memory_kind to = find_location(target).kind, from = find_location(source).kind;
    const char *names[3][3] = {
        {"pageable to pageable", "pageable to pinned", "pageable to device"},
        {"pinned to pageable", "pinned to pinned", "pinned to device"},
        {"device to pageable", "device to pinned", "device to device"},
    };
    int waits = (from == DEVICE && to == PAGEABLE) || (from == PAGEABLE && to == DEVICE);
    if (waits && is_capturing(stream)) return CAPTURE_UNSUPPORTED;
    record_in_stream(stream, COPY, names[from][to]);
    if (waits) record_event(SYNC, names[from][to]);
    copy(target, source, num_bytes);
    return SUCCESS;
}

EXPORT int cudaMemcpyPeerAsync(void *target, int to, const void *source, int from, size_t num_bytes, void *stream) {
    record_in_stream(stream, COPY, "device to device");
    return SUCCESS;
}

EXPORT int cuMemcpyDtoH_v2(void *target, uintptr_t source, size_t num_bytes) {
    return cudaMemcpy(target, (void *)source, num_bytes, 2);
}

ACCEPT(cudaMemset)
ACCEPT(cudaMemsetAsync)
ACCEPT(cudaMemcpyToSymbol)

/* ---- kinds of addresses */

EXPORT int cuPointerGetAttribute(void *value, int attribute, uintptr_t address) {
    enum { CONTEXT = 1, DEVICE_POINTER = 3, DEVICE_ORDINAL = 9 };
    struct location at = find_location((void *)address);
    if (at.kind == PAGEABLE) return INVALID_VALUE;
    switch (attribute) {
        case CONTEXT: *(uintptr_t *)value = 0x1000 + at.device; break;
        case DEVICE_POINTER: *(uintptr_t *)value = address; break;
        case DEVICE_ORDINAL: *(int *)value = at.device; break;
        default: *(int *)value = 0;
    }
    return SUCCESS;
}
