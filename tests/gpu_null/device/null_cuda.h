/* The null CUDA device: shared declarations.
 *
 * The library replaces the CUDA runtime, driver, cuBLAS and NCCL functions that PyTorch calls. It computes nothing:
 * device memory has addresses but no contents, kernels and collectives are counted, and copies to the host are zero.
 * All work completes immediately, so streams have no state, except that one may capture a graph.
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

/* Kinds of counted events. recording.py has the same list.
 *
 * SYNC: the host waits for work of this step or the previous step, which may still run. LATE_WAIT: the host waits for
 * an event of an earlier step, which only limits how far it runs ahead of the device.
 */
enum event_kind {
    LAUNCH, MATMUL, COLLECTIVE, COPY, SYNC, LATE_WAIT, DEVICE_ALLOCATION, PINNED_ALLOCATION, NUM_EVENT_KINDS
};

/* events.c */
void record_event(enum event_kind kind, const char *detail);
long current_step(void);
const char *kernel_name(const void *host_function);

/* graphs.c: a call in a capturing stream is part of a graph, and no event. */
#define CAPTURE_UNSUPPORTED 900 /* error of the runtime and of the driver */
void record_in_stream(const void *stream, enum event_kind kind, const char *detail);
int is_capturing(const void *stream);
int is_any_capturing(void);

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

/* Callers never dereference handles, so a zeroed block is sufficient for each of them. */
void *new_handle(void);

#endif
