/* NCCL and cuBLAS: calls are counted, results are not computed. */
#include "null_cuda.h"

/* ---- NCCL: a communicator stores its size and its rank */

struct communicator {
    int rank;
    int size;
};

struct unique_id {
    char bytes[128];
};

static int make_communicator(void **result, int size, int rank) {
    struct communicator *communicator = new_handle();
    communicator->rank = rank;
    communicator->size = size;
    *result = communicator;
    return 0;
}

EXPORT int ncclCommInitRank(void **result, int size, struct unique_id id, int rank) {
    return make_communicator(result, size, rank);
}

EXPORT int ncclCommInitRankConfig(void **result, int size, struct unique_id id, int rank, void *config) {
    return make_communicator(result, size, rank);
}

EXPORT int ncclCommInitRankScalable(void **result, int size, int rank, int num_ids, void *ids, void *config) {
    return make_communicator(result, size, rank);
}

EXPORT int ncclCommSplit(struct communicator *parent, int color, int key, void **result, void *config) {
    if (color >= 0) return make_communicator(result, parent->size, key);
    *result = 0;
    return 0;
}

EXPORT int ncclCommCount(struct communicator *communicator, int *size) {
    *size = communicator->size;
    return 0;
}

EXPORT int ncclCommUserRank(struct communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return 0;
}

EXPORT int ncclGetVersion(int *version) {
    *version = 23007;
    return 0;
}

EXPORT int ncclGetUniqueId(struct unique_id *id) {
    *id = (struct unique_id){{1}};
    return 0;
}

EXPORT int ncclCommGetAsyncError(void *communicator, int *error) {
    *error = 0;
    return 0;
}

EXPORT int ncclCommRegister(void *communicator, void *buffer, size_t num_bytes, void **handle) {
    *handle = buffer;
    return 0;
}

EXPORT int ncclCommMemStats(void *communicator, int statistic, uint64_t *value) {
    *value = 0;
    return 0;
}

EXPORT int ncclRedOpCreatePreMulSum(int *operation, void *scalar, int type, int residence, void *communicator) {
    *operation = 5; /* after NCCL's five built-in operations */
    return 0;
}

EXPORT const char *ncclGetErrorString(int error) { return "the null CUDA device reports no details"; }
EXPORT const char *ncclGetLastError(void *communicator) { return ncclGetErrorString(0); }

ACCEPT(ncclCommAbort)
ACCEPT(ncclCommDeregister)
ACCEPT(ncclCommDestroy)
ACCEPT(ncclCommFinalize)
ACCEPT(ncclRedOpDestroy)

#define COLLECTIVE_CALL(name)              \
    EXPORT int name(void) {                \
        record_event(COLLECTIVE, #name);   \
        return 0;                          \
    }

COLLECTIVE_CALL(ncclAllGather)
COLLECTIVE_CALL(ncclAllReduce)
COLLECTIVE_CALL(ncclAlltoAll)
COLLECTIVE_CALL(ncclBcast)
COLLECTIVE_CALL(ncclBroadcast)
COLLECTIVE_CALL(ncclReduce)
COLLECTIVE_CALL(ncclReduceScatter)

/* NCCL runs all messages of a group as one kernel, so they count as one call. */
static __thread int group_depth = 0;
static __thread int messages_in_group = 0;

EXPORT int ncclGroupStart(void) {
    group_depth++;
    return 0;
}

EXPORT int ncclGroupEnd(void) {
    if (--group_depth > 0 || messages_in_group == 0) return 0;
    messages_in_group = 0;
    record_event(COLLECTIVE, "group of ncclSend and ncclRecv");
    return 0;
}

static int message(const char *name) {
    if (group_depth > 0)
        messages_in_group++;
    else
        record_event(COLLECTIVE, name);
    return 0;
}

EXPORT int ncclSend(void) { return message("ncclSend"); }
EXPORT int ncclRecv(void) { return message("ncclRecv"); }

/* ---- cuBLAS */

struct blas {
    int math_mode;
    int pointer_mode;
    void *stream;
};

EXPORT int cublasCreate_v2(void **handle) {
    *handle = new_handle();
    return 0;
}

EXPORT int cublasGetMathMode(struct blas *handle, int *mode) {
    *mode = handle->math_mode;
    return 0;
}

EXPORT int cublasSetMathMode(struct blas *handle, int mode) {
    handle->math_mode = mode;
    return 0;
}

EXPORT int cublasGetPointerMode_v2(struct blas *handle, int *mode) {
    *mode = handle->pointer_mode;
    return 0;
}

EXPORT int cublasSetPointerMode_v2(struct blas *handle, int mode) {
    handle->pointer_mode = mode;
    return 0;
}

EXPORT int cublasSetStream_v2(struct blas *handle, void *stream) {
    handle->stream = stream;
    return 0;
}

ACCEPT(cublasDestroy_v2)
ACCEPT(cublasSetWorkspace_v2)
ACCEPT(cublasSetSmCountTarget)

EXPORT int cublasLtCreate(void **handle) { return cublasCreate_v2(handle); }
EXPORT int cublasLtMatmulDescCreate(void **descriptor, int compute, int scale) { return cublasCreate_v2(descriptor); }
EXPORT int cublasLtMatmulPreferenceCreate(void **preference) { return cublasCreate_v2(preference); }

EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    return cublasCreate_v2(layout);
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d,
                                          void *preference, int requested, void *results, int *num_found) {
    *num_found = 1;
    return 0;
}

EXPORT size_t cublasLtGetVersion(void) { return 130101; }

ACCEPT(cublasLtDestroy)
ACCEPT(cublasLtMatmulDescDestroy)
ACCEPT(cublasLtMatmulDescSetAttribute)
ACCEPT(cublasLtMatmulPreferenceDestroy)
ACCEPT(cublasLtMatmulPreferenceSetAttribute)
ACCEPT(cublasLtMatrixLayoutDestroy)
ACCEPT(cublasLtMatrixLayoutSetAttribute)

#define MATMUL_CALL(name)                                \
    EXPORT int name(struct blas *handle) {               \
        record_in_stream(handle->stream, MATMUL, #name); \
        return 0;                                        \
    }

MATMUL_CALL(cublasDdot_v2)
MATMUL_CALL(cublasDgemm_v2)
MATMUL_CALL(cublasDgemmStridedBatched)
MATMUL_CALL(cublasDgemv_v2)
MATMUL_CALL(cublasDotEx)
MATMUL_CALL(cublasGemmEx)
MATMUL_CALL(cublasGemmStridedBatchedEx)
MATMUL_CALL(cublasSdot_v2)
MATMUL_CALL(cublasSgemm_v2)
MATMUL_CALL(cublasSgemmEx)
MATMUL_CALL(cublasSgemmStridedBatched)
MATMUL_CALL(cublasSgemv_v2)

EXPORT int cublasLtMatmul(void *handle, void *operation, const void *alpha, const void *a, void *a_layout,
                          const void *b, void *b_layout, const void *beta, const void *c, void *c_layout, void *d,
                          void *d_layout, const void *algorithm, void *workspace, size_t workspace_bytes,
                          void *stream) {
    record_in_stream(stream, MATMUL, "cublasLtMatmul");
    return 0;
}
