// What bit_patterns.py and eight_bit.py do in a dozen operators, and a step of AdamW between the two, in one pass each,
// to the same bits. Compiled on the machine that runs it: see native_codecs.py. No state, no libraries.
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define APART static __attribute__((noinline)) // or GCC 12 does not vectorise it
#define PORTION 16384  // numbers that a thread takes at a time
#define ROW 128        // numbers with one scale; rows of smaller tensors are shorter
#define LARGEST 448.0f // of fp8, e4m3
#define STRIDE 40503u  // as in bit_patterns.py
#define INFINITE 0x7F800000u
#define NOT_A_NUMBER 0x7FC00000u

INLINE uint32_t bits_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, sizeof bits);
  return bits;
}

INLINE float number_of(uint32_t bits) {
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

INLINE int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

INLINE float widened(uint16_t kept) { return number_of((uint32_t)kept << 16); }

INLINE uint16_t rounded(float number, uint32_t draw) {
  const uint32_t bits = bits_of(number), regular = (bits & 0x7FFFFFFFu) > INFINITE ? NOT_A_NUMBER : bits;
  return (uint16_t)((regular + (draw & 0xFFFFu)) >> 16);
}

APART void decode_row(const uint8_t *restrict record, float *restrict numbers, int64_t count, uint32_t exponent) {
  const float scale = number_of(exponent ? exponent << 23 : NOT_A_NUMBER);
  for (int64_t i = 0; i < count; i++) {
    const uint32_t code = record[i], size = code & 0x7Fu;
    const uint32_t regular = (size << 20) + (120u << 23);
    const uint32_t small = bits_of((float)(int32_t)size * 0x1p-9f); // below the smallest exponent
    numbers[i] = number_of((size < 8u ? small : regular) | (code & 0x80u) << 24) * scale;
  }
}

APART void encode_row(const float *restrict numbers, uint8_t *restrict record, int64_t count, int64_t size,
                      uint32_t is_positive) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; i++) {
    const uint32_t magnitude = bits_of(numbers[i]) & 0x7FFFFFFFu;
    largest = magnitude > largest ? magnitude : largest;
  }
  if (count < size) memset(record + count, 0, (size_t)(size - count));
  if (largest >= INFINITE) {
    memset(record, 0x7F, (size_t)size);
    record[size] = 0;
    return;
  }
  float scale = number_of(largest) / LARGEST;
  if (scale < FLT_MIN) scale = 1.0f;
  const uint32_t exponent = (bits_of(scale) + 0x7FFFFFu) >> 23; // rounded up to a power of two
  const float inverse = number_of((254u - exponent) << 23);     // exact
  for (int64_t i = 0; i < count; i++) {
    const uint32_t own = bits_of(numbers[i]), magnitude = bits_of(numbers[i] * inverse) & 0x7FFFFFFFu;
    // To the nearest, halves to even: the addition rounds what is below the smallest exponent.
    const uint32_t small = bits_of(number_of(magnitude) + 0x1p14f) - (141u << 23);
    const uint32_t regular = (magnitude - (120u << 23) + 0x7FFFFu + (magnitude >> 20 & 1u)) >> 20;
    const uint32_t code = (magnitude < (121u << 23) ? small : regular) | (own >> 24 & 0x80u);
    const uint32_t floor = is_positive & (uint32_t)((int32_t)own > 0); // what is above zero does not become that
    record[i] = (uint8_t)(code > floor ? code : floor);
  }
  record[size] = (uint8_t)exponent;
}

INLINE void decode_rows(const uint8_t *records, float *numbers, int64_t count, int64_t size) {
  for (int64_t first = 0; first < count; first += size, records += size + 1)
    decode_row(records, numbers + first, least(size, count - first), records[size]);
}

INLINE void encode_rows(const float *numbers, uint8_t *records, int64_t count, int64_t size, uint32_t is_positive) {
  for (int64_t first = 0; first < count; first += size, records += size + 1)
    encode_row(numbers + first, records, least(size, count - first), size, is_positive);
}

// bit_patterns.rounded_by_place: `draw` is that of the first place.
void round_by_place(const float *restrict numbers, uint16_t *restrict kept, int64_t count, uint32_t draw, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += PORTION)
    for (int64_t i = first; i < least(first + PORTION, count); i++)
      kept[i] = rounded(numbers[i], draw + (uint32_t)i * STRIDE);
}

// EightBitTensor.decode: records of `size` codes and an exponent, of which the last may be filled up.
void decode_eight_bit(const uint8_t *records, float *numbers, int64_t count, int64_t size, int threads) {
  const int64_t portion = size < ROW ? size : PORTION;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += portion)
    decode_rows(records + first / size * (size + 1), numbers + first, least(portion, count - first), size);
}

// EightBitTensor.take_over.
void encode_eight_bit(const float *numbers, uint8_t *records, int64_t count, int64_t size, int is_positive,
                      int threads) {
  const int64_t portion = size < ROW ? size : PORTION;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += portion)
    encode_rows(numbers + first, records + first / size * (size + 1), least(portion, count - first), size,
                (uint32_t)is_positive);
}

typedef struct {
  float decay, share, beta2, square_share, root, eps, rate;
} Settings;

// What torch's fused AdamW does for each number, rounding as that does where it is vectorised; returns the weight.
INLINE float stepped(float weight, float gradient, float *average, float *square, Settings by) {
  *average = fmaf(by.share, gradient - *average, *average);
  *square = fmaf(by.square_share * gradient, gradient, *square * by.beta2);
  return weight * by.decay + by.rate * *average / (sqrtf(*square) / by.root + by.eps);
}

INLINE void step_wide(float *restrict weights, const float *restrict gradient, float *restrict average,
                      float *restrict square, int64_t count, Settings by) {
  for (int64_t i = 0; i < count; i++) {
    float own_average = average[i], own_square = square[i];
    weights[i] = stepped(weights[i], gradient[i], &own_average, &own_square, by);
    average[i] = own_average;
    square[i] = own_square;
  }
}

INLINE void step_bf16(float *restrict weights, const float *restrict gradient, uint16_t *restrict average,
                      uint16_t *restrict square, int64_t count, Settings by, const uint32_t *draws, uint32_t place) {
  const uint32_t draw = draws[0] + place * STRIDE, square_draw = draws[1] + place * STRIDE;
  for (int64_t i = 0; i < count; i++) {
    float own_average = widened(average[i]), own_square = widened(square[i]);
    weights[i] = stepped(weights[i], gradient[i], &own_average, &own_square, by);
    average[i] = rounded(own_average, draw + (uint32_t)i * STRIDE);
    square[i] = rounded(own_square, square_draw + (uint32_t)i * STRIDE);
  }
}

INLINE void step_eight_bit(float *weights, const float *gradient, uint8_t *average, uint8_t *square, int64_t count,
                           Settings by) {
  float wide_average[ROW], wide_square[ROW];
  for (int64_t first = 0; first < count; first += ROW, average += ROW + 1, square += ROW + 1) {
    const int64_t here = least(ROW, count - first);
    decode_row(average, wide_average, here, average[ROW]);
    decode_row(square, wide_square, here, square[ROW]);
    step_wide(weights + first, gradient + first, wide_average, wide_square, here, by);
    encode_row(wide_average, average, here, ROW, 0);
    encode_row(wide_square, square, here, ROW, 1);
  }
}

// A step, with moments in a form: 0 for bf16, 1 for 8 bit, else float32. Settings: 1 - lr * weight_decay, 1 - beta1,
// beta2, 1 - beta2, the root of the second correction, eps, minus lr divided by the first correction.
void step_adamw(float *weights, const float *gradient, void *average, void *square, int64_t count, int form,
                const float *settings, const uint32_t *draws, int threads) {
  const Settings by = {settings[0], settings[1], settings[2], settings[3], settings[4], settings[5], settings[6]};
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t at = 0; at < count; at += PORTION) {
    const int64_t here = least(PORTION, count - at), record = at / ROW * (ROW + 1);
    if (form == 0)
      step_bf16(weights + at, gradient + at, (uint16_t *)average + at, (uint16_t *)square + at, here, by, draws,
                (uint32_t)at);
    else if (form == 1)
      step_eight_bit(weights + at, gradient + at, (uint8_t *)average + record, (uint8_t *)square + record, here, by);
    else step_wide(weights + at, gradient + at, (float *)average + at, (float *)square + at, here, by);
  }
}
