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

enum { BF16, EIGHT_BIT, WIDE }; // forms of moments

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

INLINE void round_portion(const float *restrict numbers, uint16_t *restrict kept, int64_t count, uint32_t draw) {
  for (int64_t i = 0; i < count; i++) {
    const uint32_t bits = bits_of(numbers[i]);
    const uint32_t regular = (bits & 0x7FFFFFFFu) > INFINITE ? NOT_A_NUMBER : bits;
    kept[i] = (uint16_t)((regular + ((draw + (uint32_t)i * STRIDE) & 0xFFFFu)) >> 16);
  }
}

INLINE void widen_portion(const uint16_t *restrict kept, float *restrict numbers, int64_t count) {
  for (int64_t i = 0; i < count; i++) numbers[i] = number_of((uint32_t)kept[i] << 16);
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
void round_by_place(const float *numbers, uint16_t *kept, int64_t count, uint32_t draw, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t first = 0; first < count; first += PORTION)
    round_portion(numbers + first, kept + first, least(PORTION, count - first), draw + (uint32_t)first * STRIDE);
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

INLINE void widen_moment(const void *kept, float *numbers, int64_t first, int64_t count, int form) {
  if (form == BF16) widen_portion((const uint16_t *)kept + first, numbers, count);
  if (form == EIGHT_BIT) decode_rows((const uint8_t *)kept + first / ROW * (ROW + 1), numbers, count, ROW);
  if (form == WIDE) memcpy(numbers, (const float *)kept + first, (size_t)count * sizeof *numbers);
}

INLINE void narrow_moment(const float *numbers, void *kept, int64_t first, int64_t count, int form, uint32_t draw,
                          uint32_t is_positive) {
  if (form == BF16) round_portion(numbers, (uint16_t *)kept + first, count, draw + (uint32_t)first * STRIDE);
  if (form == EIGHT_BIT) encode_rows(numbers, (uint8_t *)kept + first / ROW * (ROW + 1), count, ROW, is_positive);
  if (form == WIDE) memcpy((float *)kept + first, numbers, (size_t)count * sizeof *numbers);
}

// What torch's fused AdamW does for each number, rounding as that does where it is vectorised.
INLINE void step_portion(float *restrict weights, const float *restrict gradient, float *restrict average,
                         float *restrict square, int64_t count, const float *restrict settings) {
  const float decay = settings[0], share = settings[1], beta2 = settings[2], square_share = settings[3];
  const float root = settings[4], eps = settings[5], rate = settings[6];
  for (int64_t i = 0; i < count; i++) {
    const float own = gradient[i];
    average[i] = fmaf(share, own - average[i], average[i]);
    square[i] = fmaf(square_share * own, own, square[i] * beta2);
    weights[i] = weights[i] * decay + rate * average[i] / (sqrtf(square[i]) / root + eps);
  }
}

INLINE void step_in_form(float *weights, const float *gradient, void *average, void *square, int64_t count,
                         const float *settings, const uint32_t *draws, int threads, int form) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t portion = 0; portion < count; portion += PORTION) {
    float wide_average[ROW], wide_square[ROW];
    const int64_t stop = least(portion + PORTION, count);
    for (int64_t first = portion; first < stop; first += ROW) {
      const int64_t here = least(ROW, stop - first);
      widen_moment(average, wide_average, first, here, form);
      widen_moment(square, wide_square, first, here, form);
      step_portion(weights + first, gradient + first, wide_average, wide_square, here, settings);
      narrow_moment(wide_average, average, first, here, form, draws[0], 0);
      narrow_moment(wide_square, square, first, here, form, draws[1], 1);
    }
  }
}

// A step, with moments in a form. Settings: 1 - lr * weight_decay, 1 - beta1, beta2, 1 - beta2, the root of the second
// correction, eps, minus lr divided by the first correction.
void step_adamw(float *weights, const float *gradient, void *average, void *square, int64_t count, int form,
                const float *settings, const uint32_t *draws, int threads) {
  if (form == BF16) step_in_form(weights, gradient, average, square, count, settings, draws, threads, BF16);
  if (form == EIGHT_BIT) step_in_form(weights, gradient, average, square, count, settings, draws, threads, EIGHT_BIT);
  if (form == WIDE) step_in_form(weights, gradient, average, square, count, settings, draws, threads, WIDE);
}
