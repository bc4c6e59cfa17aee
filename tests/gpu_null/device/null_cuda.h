/* The null CUDA device: shared declarations.
 *
 * The library replaces the CUDA runtime, driver, cuBLAS and NCCL entry points that PyTorch calls. Nothing is
 * computed: device memory has addresses but no contents, kernels and collectives are counted, and everything that is
 * copied to the host is zero. Streams and events need no state because all work is complete at once.
 */
#ifndef NULL_CUDA_H
#define NULL_CUDA_H

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

/* Accept any arguments and report success. The x86-64 and AArch64 calling conventions ignore extra arguments. */
#define ACCEPT(name)       \
    EXPORT int name(void); \
    int name(void) { return 0; }

/* What a step is charged for. recording.py has the same list.
 *
 * SYNC: the host waits for work of this step or of the one before, which may still be under way. LATE_WAIT: it waits
 * for an event of an earlier step, which only keeps the host from running further ahead of the device.
 */
enum event_kind {
    LAUNCH, MATMUL, COLLECTIVE, COPY, SYNC, LATE_WAIT, DEVICE_ALLOCATION, PINNED_ALLOCATION, NUM_EVENT_KINDS
};

/* events.c */
void record_event(enum event_kind kind, const char *detail);
long current_step(void);
const char *kernel_name(const void *host_function);

/* memory.c */
enum memory_kind { PAGEABLE = 0, PINNED = 1, DEVICE = 2 }; /* values of cudaMemoryType */
struct location {
    enum memory_kind kind;
    int device;
};
struct location find_location(const void *address);
int current_device(void);
int num_devices(void);
size_t free_memory(void);
size_t total_memory(void);

/* Returned handles are never dereferenced outside this library, so a zeroed block serves for each of them. */
void *new_handle(void);

#endif
