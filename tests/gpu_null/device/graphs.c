/* Stream capture and CUDA graphs. A graph has no nodes, only their number: the calls in the stream that captured it.
 *
 * Calls in a capturing stream are not counted. A launch of a graph counts as one launch. As on a real device, the host
 * must not wait for a capturing stream, nor copy pageable memory in it. Only the stream in which a capture began
 * captures: streams that join it by events are not followed.
 */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdlib.h>

#include "null_cuda.h"

struct graph {
    size_t num_nodes;
};

static void *capturing_stream = NULL;
static struct graph *captured = NULL;
static unsigned long long capture_id = 0;

int is_capturing(const void *stream) { return captured != NULL && stream == capturing_stream; }

int is_any_capturing(void) { return captured != NULL; }

void record_in_stream(const void *stream, enum event_kind kind, const char *detail) {
    if (is_capturing(stream))
        captured->num_nodes++;
    else
        record_event(kind, detail);
}

static struct graph *new_graph(size_t num_nodes) {
    struct graph *graph = new_handle();
    graph->num_nodes = num_nodes;
    return graph;
}

/* ---- capture */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (stream == NULL) return cudaErrorStreamCaptureImplicit;
    if (captured != NULL) return cudaErrorIllegalState;
    capturing_stream = stream;
    capture_id++;
    captured = new_graph(0);
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (!is_capturing(stream)) return cudaErrorIllegalState;
    *graph = (cudaGraph_t)captured;
    captured = NULL;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = is_capturing(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                                            unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            const cudaGraphEdgeData **edges, size_t *num_nodes) {
    if (id != NULL) *id = is_capturing(stream) ? capture_id : 0;
    if (graph != NULL) *graph = is_capturing(stream) ? (cudaGraph_t)captured : NULL;
    if (num_nodes != NULL) *num_nodes = 0;
    return cudaStreamIsCapturing(stream, status);
}

/* ---- graphs */

EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
    *num_nodes = ((struct graph *)graph)->num_nodes;
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph,
                                                 unsigned long long flags) {
    *executable = (cudaGraphExec_t)new_graph(((struct graph *)graph)->num_nodes);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
    record_in_stream(stream, LAUNCH, "cudaGraphLaunch");
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

EXPORT cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
    free(executable);
    return cudaSuccess;
}
