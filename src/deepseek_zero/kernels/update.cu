// The update of an optimizer, in one pass over a flat shard.
//
// cuda_source.py writes variant.h, which defines the types of the arrays (Gradient, Main, Other, State), constants, and
// the function `formula` of one variant.
//
// Every operation on numbers is an intrinsic that rounds to the nearest fp32 number, so the compiler cannot fuse or
// approximate any. Integer operations test for NaN, because a compiler may remove `x != x`.

struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
struct low_half { short bits; };  // the low half of an fp32 number whose upper half was rounded to bf16
struct nothing {};

typedef unsigned long long uint64;

struct Scalars { float at[8]; };
struct Chance { uint64 element, step, seed, keys[3]; };  // see the class in check.py

enum : unsigned { CANONICAL_NAN = 0x7FC00000 };

__device__ bool is_nan(unsigned bits) { return (bits & 0x7FFFFFFF) > 0x7F800000; }

__device__ float settled(float value) {
    return is_nan(__float_as_uint(value)) ? __uint_as_float(CANONICAL_NAN) : value;
}

__device__ float as_float(float value) { return value; }

__device__ float as_float(bf16 value) { return __uint_as_float((unsigned)value.bits << 16); }

__device__ float as_float(fp16 value) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
}

// Return the main weight. A program may have changed a bf16 weight without its remainder. If their sum is NaN and the
// weight is not, the main weight is the weight.
template <class Main, class Other> __device__ float main_weight(Main main, Other) { return as_float(main); }

__device__ float main_weight(bf16 upper, low_half lower) {
    unsigned exposed = (unsigned)upper.bits << 16;
    unsigned sum = exposed + (int)lower.bits;
    return __uint_as_float(is_nan(sum) ? exposed : sum);
}

// Store a settled number. The 16 bits of `random` round bf16 states, and a bf16 weight without a main weight. With a
// main weight, ties of bf16 are rounded away from zero, and ties of fp16 to even.
__device__ bf16 rounded(float value, unsigned add) { return {(unsigned short)((__float_as_uint(value) + add) >> 16)}; }

__device__ void store(float value, float& number, unsigned) { number = value; }

__device__ void store(float value, bf16& number, unsigned random) { number = rounded(value, random); }

template <class Main> __device__ void store(float value, Main& main, nothing&, unsigned random) {
    store(value, main, random);
}

__device__ void store(float value, float& main, bf16& published, unsigned) {
    main = value;
    published = rounded(value, 0x8000);
}

__device__ void store(float value, float& main, fp16& published, unsigned) {
    main = value;
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    published.bits = is_nan(__float_as_uint(value)) ? 0x7E00 : bits;  // cvt gives NaN as 0x7FFF
}

__device__ void store(float value, bf16& upper, low_half& lower, unsigned) {
    upper = rounded(value, 0x8000);
    lower.bits = (short)__float_as_uint(value);
}

#include "variant.h"

// N elements that one instruction reads or writes, or a few instructions of 16 bytes.
template <class Number, int N> struct alignas(N * sizeof(Number) < 16 ? N * sizeof(Number) : 16) Pack {
    Number at[N];
};

template <int N, class Number> __device__ Pack<Number, N>& pack(Number* array, long long i) {
    return *reinterpret_cast<Pack<Number, N>*>(array + i);
}

template <int N, class Number> __device__ const Pack<Number, N>& pack(const Number* array, long long i) {
    return *reinterpret_cast<const Pack<Number, N>*>(array + i);
}

// The random bits of N elements of a parameter; N is 1 or 8. One count of Philox4x64-10 serves 16 elements.
template <int N> struct Random {
    uint64 low, high;  // of eight elements
    unsigned first;

    __device__ Random(const Chance& chance, uint64 key, uint64 element) : first(N == 1 ? element & 7 : 0) {
        uint64 a = element / 16 + 1, b = chance.step, c = 0, d = 0, left = chance.seed, right = key;
        #pragma unroll
        for (int round = 0; round < 10; round++) {
            uint64 low0 = a * 0xD2E7470EE14C6C93, high0 = __umul64hi(a, 0xD2E7470EE14C6C93);
            uint64 low1 = c * 0xCA5A826395121157, high1 = __umul64hi(c, 0xCA5A826395121157);
            a = high1 ^ b ^ left;
            b = low1;
            c = high0 ^ d ^ right;
            d = low0;
            left += 0x9E3779B97F4A7C15;
            right += 0xBB67AE8584CAA73B;
        }
        low = element & 8 ? c : a;
        high = element & 8 ? d : b;
    }

    __device__ unsigned at(int k) const {
        k += first;
        return ((k < 4 ? low : high) >> k % 4 * 16) & 0xFFFF;
    }
};

template <int N>
__device__ void update_pack(long long i, bool is_tail, const Gradient* __restrict__ gradient, Main* __restrict__ main,
                            Other* __restrict__ other, State* __restrict__ first, State* __restrict__ second,
                            const Scalars& scalars, float factor, const Chance& chance) {
    Pack<Gradient, N> d = pack<N>(gradient, i);
    Pack<Main, N> p = pack<N>(main, i);
    Pack<Other, N> q;
    Pack<State, N> a, b;
    if (IS_SPLIT) q = pack<N>(other, i);
    if (READS_STATES && STATES > 0) a = pack<N>(first, i);
    if (READS_STATES && STATES > 1) b = pack<N>(second, i);
    Random<N> of_weight(chance, chance.keys[0], chance.element + i);
    Random<N> of_first(chance, chance.keys[1], chance.element + i);
    Random<N> of_second(chance, chance.keys[2], chance.element + i);
    #pragma unroll
    for (int k = 0; k < N; k++) {
        float weight = main_weight(p.at[k], q.at[k]), m = as_float(a.at[k]), v = as_float(b.at[k]);
        formula(weight, __fmul_rn(as_float(d.at[k]), factor), m, v, scalars, is_tail);
        store(settled(weight), p.at[k], q.at[k], of_weight.at(k));
        store(settled(m), a.at[k], of_first.at(k));
        store(settled(v), b.at[k], of_second.at(k));
    }
    pack<N>(main, i) = p;
    if (IS_SPLIT || PUBLISHES) pack<N>(other, i) = q;
    if (STATES > 0) pack<N>(first, i) = a;
    if (STATES > 1) pack<N>(second, i) = b;
}

// Each thread updates eight elements; the last numel % 8 elements are a parameter's tail. is_aligned means that all
// arrays begin at multiples of 16 bytes, and the shard at a multiple of 8 elements of its parameter. If not, neighbouring
// threads update neighbouring elements, one at a time. The optimizer's count of updates at count_at is incremented.
extern "C" __global__ void __launch_bounds__(THREADS, 4) // at most 64 registers, which suffice without spills
update(const Gradient* __restrict__ gradient, Main* __restrict__ main, Other* __restrict__ other,
       State* __restrict__ first, State* __restrict__ second, long long numel, int is_aligned, Scalars scalars,
       Chance chance, float factor, const float* factor_at, const float* skip_at, float* count_at) {
    if (skip_at && *skip_at != 0.0f) return;
    if (count_at && blockIdx.x == 0 && threadIdx.x == 0) *count_at += 1.0f;
    if (factor_at) factor = *factor_at;
    long long block = 8LL * blockIdx.x * blockDim.x;
    long long body = numel & ~7LL;
    long long i = block + (is_aligned ? 8 * threadIdx.x : threadIdx.x);
    long long step = is_aligned ? 1 : blockDim.x;
    if (is_aligned && i < body) {
        update_pack<8>(i, false, gradient, main, other, first, second, scalars, factor, chance);
        return;
    }
    for (int k = 0; k < 8; k++, i += step) {
        if (i < numel) {
            update_pack<1>(i, i >= body, gradient, main, other, first, second, scalars, factor, chance);
        }
    }
}
