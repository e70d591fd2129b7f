// adam_cuda.cu: unscale, clip, Adam(W) and the half-precision copy for any number of tensors, in one pass over memory
//
// The formula per element at step t (Adam: arXiv:1412.6980, Algorithm 1; AdamW: arXiv:1711.05101, Algorithm 2):
//
//     g = grad * factor                 factor = clip / loss scale
//     AdamW:  p = p - lr*wd * p         decoupled: the decay never enters the moments
//     Adam:   g = g + wd * p            L2: the decay is part of the gradient
//     m = beta1 * m + (1 - beta1) * g
//     v = beta2 * v + (1 - beta2) * g*g
//     p = p - lr/(1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)
//     half = bf16 or fp16 of p          what the next forward reads
//
// The clip needs the norm of all gradients first, so a step is four launches, none of which the host waits for:
//
//     adam_square_sums   gradients -> one sum of squares per chunk; reads 4 B per element (fp32) or 2 B
//     adam_total         these -> one number, which sharded engines then all-reduce
//     adam_prepare       -> norm, clip, overflow, loss scale, step counts, the formula's constants per parameter
//     adam_update        the formula; 28 B per element (fp32 without a half copy, or half gradient and half
//                        copy), 30 B with an fp32 gradient and a half copy
//
// Nothing is added in an order that depends on timing: the same input gives the same bits in every run, on any rank.
// Python calls this through ctypes (no torch headers: it builds in seconds) and has checked device, dtype and length.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

// ---- 1. data: tables in device memory, which Python fills as rows of int64, int32 and float64 ----

constexpr int CHUNK = 16384;       // elements per block of adam_square_sums, 64 per thread
// Elements per block of adam_update, a part of a chunk: blocks that run together then work on neighbouring addresses
// of each tensor. 1.56e9 elements with fp32 gradients on an H200, of the rate of a copy: 93 % in pieces of 16,384,
// 96 % of 2,048, 99 % with 4 elements in flight per thread instead of 8 and 5 blocks per multiprocessor, not 4.
constexpr int PIECE = 2048;
constexpr int THREADS = 256;       // per block
constexpr int ONE_BLOCK = 1024;    // per block of adam_total, which has only one
constexpr int IN_FLIGHT = 4;       // elements of each tensor that a thread of adam_update loads before it uses one
constexpr int FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2;

struct Fragment {         // what this rank's optimizer owns of one parameter
    float* master;        // fp32 weights; without a half copy they are the parameter itself
    const void* grad;     // times the loss scale; never null
    float* exp_avg;       // m
    float* exp_avg_sq;    // v
    void* half;           // copy of the master, or null
    int64_t numel;        // may pass 2^31, may be 0 (then no chunk refers to it)
    int64_t param;        // index into group_of, present, steps and constants
    int64_t dtypes;       // of grad + 4 * of half
};
struct Chunk {            // elements [index * CHUNK, min((index + 1) * CHUNK, numel)) of a fragment
    int32_t fragment, index;
};
struct Group {            // hyperparameters of one of the user's param groups
    double lr, beta1, beta2, eps, weight_decay, adamw;
};
struct Constants {            // per parameter, from adam_prepare; all 0 where nothing is to be done
    float active;             // 1: some rank had a gradient, and no gradient of the model overflowed
    float one_minus_beta1;    // rounded from double: in fp32, 1 - 0.999f is 1.3e-5 off. The kernel takes beta as
    float one_minus_beta2;    // 1 - this, at most 2^-25 off, so that both weights of a moment still sum to 1
    float step_size;          // lr / (1 - beta1^t)
    float sqrt_bias2;         // sqrt(1 - beta2^t)
    float eps;
    float decay;              // AdamW: lr * weight_decay, otherwise 0
    float l2;                 // Adam: weight_decay, otherwise 0
};
struct State {                // double state[8], which Python hands out as device tensors
    double scale;             // the loss scale of the next backward
    double good_steps;        // finite steps since the scale last changed
    double skipped;           // 1 if this step was
    double skipped_steps, skipped_in_a_row;
    double grad_norm;         // unscaled, before clipping; inf or nan in a skipped step
    double factor;            // clip / the scale of this step's backward
    double unused;
};
struct Policy {               // of clipping (max_norm 0: none) and of the loss scale (interval 0: it never changes)
    double max_norm, growth, backoff, interval, floor, ceiling;
};
static_assert(sizeof(Fragment) == 64 && sizeof(Chunk) == 8 && sizeof(Group) == 48, "rows as Python writes them");
static_assert(sizeof(Constants) == 32 && sizeof(State) == 64, "8 floats, 8 doubles");
static_assert(CHUNK % PIECE == 0 && PIECE % (4 * THREADS) == 0, "chunks and pieces are as aligned as their fragment");

namespace {    // what follows, up to the launchers, is no part of the interface

template <typename T, int WIDTH>
struct alignas(WIDTH * sizeof(T)) Vector {    // alignas makes a copy one access: 16 B for 4 floats, 8 B for 4 halves
    T at[WIDTH];
};
template <int WIDTH, typename T>
__device__ Vector<T, WIDTH> load(const T* from) { return *reinterpret_cast<const Vector<T, WIDTH>*>(from); }
template <int WIDTH, typename T>
__device__ void store(T* to, const Vector<T, WIDTH>& x) { *reinterpret_cast<Vector<T, WIDTH>*>(to) = x; }
__device__ bool aligned(const void* pointer, int bytes) { return reinterpret_cast<uintptr_t>(pointer) % bytes == 0; }

// What comes out of a table could point to shared memory, for all nvcc knows. Told better, it uses LDG and STG.
template <typename T>
__device__ T* global(T* pointer) {
    __builtin_assume(__isGlobal(pointer));
    return pointer;
}

// By name, for torch's build flags switch the half types' casts off. To half: to nearest even, overflow to inf.
__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }
__device__ void from_float(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }
__device__ void from_float(float x, __half& y) { y = __float2half_rn(x); }

// Call function(pointer to the gradient's first element in this chunk, as its own type). The branch, like those on
// alignment, goes the same way in the whole block: no warp diverges.
template <typename Function>
__device__ void with_grad(const Fragment& f, int64_t start, Function function) {
    switch (f.dtypes % 4) {
        case FLOAT32: function(global(static_cast<const float*>(f.grad)) + start); break;
        case BFLOAT16: function(global(static_cast<const __nv_bfloat16*>(f.grad)) + start); break;
        case FLOAT16: function(global(static_cast<const __half*>(f.grad)) + start); break;
    }
}

// ---- 2. the update of one element, written here and nowhere else ----

// fp32, IEEE division and root. Fused multiply-adds are spelled out: chosen by the compiler they could differ between
// the vector and the scalar path, and a weight's bits would depend on its address. torch's fused Adam has the same
// formula with lr, betas and eps in double, so it differs by rounding.
__device__ void update(const Constants& c, float factor, float grad, float& p, float& m, float& v) {
    float g = grad * factor;
    p = fmaf(-c.decay, p, p);
    g = fmaf(c.l2, p, g);
    m = fmaf(1.0f - c.one_minus_beta1, m, c.one_minus_beta1 * g);
    v = fmaf(1.0f - c.one_minus_beta2, v, c.one_minus_beta2 * g * g);
    p -= c.step_size * m / (sqrtf(v) / c.sqrt_bias2 + c.eps);
}

// ---- 3. kernels: sums of squares, and their total ----

__device__ double block_sum(double value) {    // valid in thread 0: a tree inside each warp, then the warps in order
    __shared__ double warp_sums[32];
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_down_sync(0xffffffffu, value, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    for (int warp = 0; threadIdx.x == 0 && warp < int(blockDim.x) / 32; ++warp) sum += warp_sums[warp];
    return sum;
}

// Thread t squares elements 4t..4t+3 of every 1,024, four such vectors in flight, then one of the up to 3 left over.
// Not ALIGNED it loads the same elements one by one (neighbouring threads 16 B apart, the L1 cache helps) and adds
// them in the same order, so that the norm's bits do not depend on addresses either. Up to 64 squares are added in
// fp32: gradients that reach 2e18, loss scale included, can overflow here and skip the step.
template <bool ALIGNED, typename Grad>
__device__ float square_sum(const Grad* grad, int numel) {
    constexpr int UNROLL = 4, STRIDE = 4 * THREADS;
    const int whole = numel / 4 * 4, last = whole + threadIdx.x;
    float sum = 0;
    for (int base = 4 * threadIdx.x; base < whole; base += UNROLL * STRIDE) {
        Vector<Grad, 4> g[UNROLL] = {};    // what is not loaded counts as 0
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = base + u * STRIDE;
            if (i < whole && ALIGNED) g[u] = load<4>(grad + i);
            for (int k = 0; k < 4 && i < whole && !ALIGNED; ++k) g[u].at[k] = grad[i + k];
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            for (int k = 0; k < 4; ++k) sum = fmaf(to_float(g[u].at[k]), to_float(g[u].at[k]), sum);
    }
    return last < numel ? fmaf(to_float(grad[last]), to_float(grad[last]), sum) : sum;
}

// One block per chunk, one sum per block. Reads 4 or 2 B per element. int is safe inside a chunk, `start` is int64.
// Wants the gradient at a multiple of 16 B (fp32) or 8 B (bf16, fp16); elsewhere it is slower.
__global__ void __launch_bounds__(THREADS)
square_sums_kernel(const Fragment* fragments, const Chunk* chunks, double* sums) {
    const Chunk chunk = chunks[blockIdx.x];
    const Fragment f = fragments[chunk.fragment];
    const int64_t start = int64_t(chunk.index) * CHUNK;
    const int numel = int(f.numel - start < CHUNK ? f.numel - start : CHUNK);
    float sum = 0;
    with_grad(f, start, [&](auto* grad) {
        sum = aligned(grad, 4 * sizeof(*grad)) ? square_sum<true>(grad, numel) : square_sum<false>(grad, numel);
    });
    const double total = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = total;
}

// One block; thread t adds sums t, t + 1024, ... in double, eight loads in flight. 8 B per chunk.
__global__ void __launch_bounds__(ONE_BLOCK) total_kernel(const double* sums, int64_t n_sums, double* total) {
    double sum = 0;
#pragma unroll 8
    for (int64_t i = threadIdx.x; i < n_sums; i += ONE_BLOCK) sum += sums[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *total = sum;
}

// ---- 4. kernel: what this step does ----

__device__ void decide(double total, bool skip, const Policy& policy, State& s) {
    const double scale = s.scale, norm = sqrt(total) / scale;
    // 1e-6 as in torch.nn.utils.clip_grad_norm_. Below max_norm, clip is exactly 1 and changes no bit.
    const double clip = policy.max_norm > 0 ? fmin(1.0, policy.max_norm / (norm + 1e-6)) : 1.0;
    s.grad_norm = norm;
    s.factor = clip / scale;
    s.skipped = skip;
    s.skipped_steps += skip;
    s.skipped_in_a_row = skip ? s.skipped_in_a_row + 1 : 0;
    if (policy.interval == 0) return;
    s.good_steps = skip ? 0 : s.good_steps + 1;
    if (skip) {
        s.scale = fmax(policy.floor, scale * policy.backoff);
    } else if (s.good_steps >= policy.interval) {
        s.scale = fmin(policy.ceiling, scale * policy.growth);
        s.good_steps = 0;
    }
}

// One block. Thread 0 alone touches the state; thread t prepares parameters t, t + 256, ... All learn of an overflow
// from `total`, which nobody writes meanwhile. Powers in double, for the reason given at one_minus_beta1.
__global__ void __launch_bounds__(THREADS)
prepare_kernel(const double* total, const Group* groups, const int64_t* group_of, const double* present,
               int64_t n_params, float* steps, Constants* constants, State* state, Policy policy) {
    const bool skip = !isfinite(*total);
    if (threadIdx.x == 0) decide(*total, skip, policy, *state);
    for (int64_t i = threadIdx.x; i < n_params; i += THREADS) {
        Constants c = {};    // of an inactive parameter t may be 0, and what follows would divide by 0
        if (present[i] > 0 && !skip) {
            const Group group = groups[group_of[i]];
            const double t = steps[i] + 1;    // fp32 as torch keeps it: counts to 2^24
            steps[i] = float(t);
            c.active = 1;
            c.one_minus_beta1 = float(1 - group.beta1);
            c.one_minus_beta2 = float(1 - group.beta2);
            c.step_size = float(group.lr / (1 - pow(group.beta1, t)));
            c.sqrt_bias2 = float(sqrt(1 - pow(group.beta2, t)));
            c.eps = float(group.eps);
            (group.adamw != 0 ? c.decay : c.l2) = float(group.weight_decay * (group.adamw != 0 ? group.lr : 1));
        }
        constants[i] = c;
    }
}

// ---- 5. kernel: update ----

template <typename Half, int WIDTH>
__device__ void store_half(void* half, int64_t i, const Vector<float, WIDTH>& p) {
    Vector<Half, WIDTH> rounded;
    for (int k = 0; k < WIDTH; ++k) from_float(p.at[k], rounded.at[k]);
    store(global(static_cast<Half*>(half)) + i, rounded);
}

// Elements [start + first, start + end) of f; `grad` already points to start. Thread t takes the WIDTH elements from
// first + t * WIDTH, then those 256 * WIDTH further on. All loads of a round are issued before the first use.
template <int WIDTH, typename Grad>
__device__ void update_range(const Fragment& f, const Grad* grad, int64_t start, int first, int end,
                             const Constants& c, float factor) {
    constexpr int UNROLL = IN_FLIGHT / WIDTH, STRIDE = THREADS * WIDTH;
    float *master = global(f.master) + start, *exp_avg = global(f.exp_avg) + start;
    float* exp_avg_sq = global(f.exp_avg_sq) + start;
    for (int base = first + int(threadIdx.x) * WIDTH; base < end; base += UNROLL * STRIDE) {
        Vector<Grad, WIDTH> g[UNROLL];
        Vector<float, WIDTH> p[UNROLL], m[UNROLL], v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = base + u * STRIDE;
            if (i >= end) continue;    // in a chunk's last round only
            g[u] = load<WIDTH>(grad + i);
            p[u] = load<WIDTH>(master + i);
            m[u] = load<WIDTH>(exp_avg + i);
            v[u] = load<WIDTH>(exp_avg_sq + i);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int i = base + u * STRIDE;
            if (i >= end) continue;
            for (int k = 0; k < WIDTH; ++k)
                update(c, factor, to_float(g[u].at[k]), p[u].at[k], m[u].at[k], v[u].at[k]);
            store(master + i, p[u]);
            store(exp_avg + i, m[u]);
            store(exp_avg_sq + i, v[u]);
            if (f.half && f.dtypes / 4 == BFLOAT16) store_half<__nv_bfloat16>(f.half, start + i, p[u]);
            if (f.half && f.dtypes / 4 == FLOAT16) store_half<__half>(f.half, start + i, p[u]);
        }
    }
}

// One block per piece, at least 5 blocks per multiprocessor (at most 48 registers). Per element: p, m, v read and
// written, 24 B; g read, 4 or 2 B; half written, 2 B. int is safe inside a piece, `start` is int64.
// Vectors of 4 want every fp32 pointer at a multiple of 16 B and every half pointer at one of 8 B. One that is not
// there sends its chunks down the scalar path, which otherwise takes the up to 3 last elements.
__global__ void __launch_bounds__(THREADS, 5)
update_kernel(const Fragment* fragments, const Chunk* chunks, const Constants* constants, const State* state) {
    const Chunk chunk = chunks[blockIdx.x / (CHUNK / PIECE)];
    const Fragment f = fragments[chunk.fragment];
    const int64_t start = int64_t(chunk.index) * CHUNK + blockIdx.x % (CHUNK / PIECE) * PIECE;
    const Constants c = constants[f.param];
    // No gradient, or the step is skipped: not one bit changes. Or the fragment ends in a piece of this chunk before.
    if (c.active == 0 || start >= f.numel) return;
    const float factor = float(state->factor);
    const int numel = int(f.numel - start < PIECE ? f.numel - start : PIECE);
    with_grad(f, start, [&](auto* grad) {
        const bool vectors = aligned(grad, 4 * sizeof(*grad)) && aligned(f.master, 16) && aligned(f.exp_avg, 16) &&
                             aligned(f.exp_avg_sq, 16) && aligned(f.half, 8);
        const int whole = vectors ? numel / 4 * 4 : 0;
        update_range<4>(f, grad, start, 0, whole, c, factor);
        update_range<1>(f, grad, start, whole, numel, c, factor);
    });
}

}  // namespace

// ---- 6. launchers: every pointer is to device memory; they return the launch error, adam_error words it ----

extern "C" int64_t adam_chunk_numel() { return CHUNK; }

extern "C" const char* adam_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

// sums (n_chunks,): of the squares of each chunk's gradient, the loss scale still in it. A grid of 0 blocks would be
// an error; the limit of 2^31 - 1 blocks is 3.5e13 elements, of adam_update 4.4e12.
extern "C" int adam_square_sums(const Fragment* fragments, const Chunk* chunks, int64_t n_chunks, double* sums,
                                cudaStream_t stream) {
    if (n_chunks > 0) square_sums_kernel<<<unsigned(n_chunks), THREADS, 0, stream>>>(fragments, chunks, sums);
    return cudaGetLastError();
}

// total (1,): the sum of sums (n_sums,), 0 where there are none.
extern "C" int adam_total(const double* sums, int64_t n_sums, double* total, cudaStream_t stream) {
    total_kernel<<<1, ONE_BLOCK, 0, stream>>>(sums, n_sums, total);
    return cudaGetLastError();
}

// groups (n_groups, 6) float64, constants (n_params, 8) fp32; group_of, present, steps (n_params,). present > 0: some
// rank had a gradient for it since the last step.
extern "C" int adam_prepare(const double* total, const Group* groups, const int64_t* group_of, const double* present,
                            int64_t n_params, float* steps, Constants* constants, State* state, double max_norm,
                            double growth, double backoff, double interval, double floor, double ceiling,
                            cudaStream_t stream) {
    const Policy policy = {max_norm, growth, backoff, interval, floor, ceiling};
    prepare_kernel<<<1, THREADS, 0, stream>>>(total, groups, group_of, present, n_params, steps, constants, state,
                                              policy);
    return cudaGetLastError();
}

extern "C" int adam_update(const Fragment* fragments, const Chunk* chunks, int64_t n_chunks,
                           const Constants* constants, const State* state, cudaStream_t stream) {
    const unsigned n_pieces = unsigned(n_chunks * (CHUNK / PIECE));
    if (n_chunks > 0) update_kernel<<<n_pieces, THREADS, 0, stream>>>(fragments, chunks, constants, state);
    return cudaGetLastError();
}
