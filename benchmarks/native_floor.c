/* What one writes in C for the same local training: a two-layer GCN on sparse features, Adam, dropout between the
 * layers, every client on its own copy of all weights. A figure to compare with, not a part of Isthmus. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static uint64_t state = 88172645463325252ULL;
static inline uint64_t bits(void) { state ^= state << 13; state ^= state >> 7; state ^= state << 17; return state; }

static void spmm(int rows, const int64_t *ptr, const int32_t *idx, const float *val, const float *x, int w, float *out) {
  for (int r = 0; r < rows; r++) {
    float *o = out + (int64_t)r * w;
    memset(o, 0, sizeof(float) * w);
    for (int64_t j = ptr[r]; j < ptr[r + 1]; j++) {
      const float v = val[j], *s = x + (int64_t)idx[j] * w;
      for (int h = 0; h < w; h++) o[h] += v * s[h];
    }
  }
}

static void adam(int64_t n, float *restrict w, float *restrict m, float *restrict v, const float *restrict g, float lr,
                 float wd, float c1, float c2) {
  for (int64_t i = 0; i < n; i++) {
    const float d = g[i] + wd * w[i];
    m[i] = 0.9f * m[i] + 0.1f * d;
    v[i] = 0.999f * v[i] + 0.001f * d * d;
    w[i] -= lr / c1 * m[i] / (sqrtf(v[i] / c2) + 1e-8f);
  }
}

/* One client: `epochs` steps from `w` (F*H + H + H*C + C floats), in place; S (p, F), St (F, p), A (q, p), At (p, q). */
void train(int f, int h, int c, int p, int q, const int64_t *sp, const int32_t *si, const float *sv, const int64_t *tp,
           const int32_t *ti, const float *tv, const int64_t *ap, const int32_t *ai, const float *av, const int64_t *bp,
           const int32_t *bi, const float *bv, const int64_t *y, float *w, float *m, float *v, int step, int epochs,
           float lr, float wd, int drop) {
  const int64_t n1 = (int64_t)f * h, size = n1 + h + (int64_t)h * c + c;
  float *w1 = w, *b1 = w + n1, *w2 = b1 + h, *b2 = w2 + (int64_t)h * c;
  float *z = malloc(sizeof(float) * p * h), *u = malloc(sizeof(float) * p * c), *o = malloc(sizeof(float) * q * c);
  float *gu = malloc(sizeof(float) * p * c), *gz = malloc(sizeof(float) * p * h), *g = malloc(sizeof(float) * size);
  for (int e = 0; e < epochs; e++) {
    spmm(p, sp, si, sv, w1, h, z);
    for (int r = 0; r < p; r++)
      for (int i = 0; i < h; i++) {
        float x = z[r * h + i] + b1[i];
        x = x > 0 ? x : 0;
        if (drop) x = (bits() & 1) ? 2 * x : 0;
        z[r * h + i] = x;
      }
    memset(u, 0, sizeof(float) * p * c);
    for (int r = 0; r < p; r++)
      for (int i = 0; i < h; i++) {
        const float x = z[r * h + i];
        if (x != 0)
          for (int k = 0; k < c; k++) u[r * c + k] += x * w2[i * c + k];
      }
    spmm(q, ap, ai, av, u, c, o);
    float *gb2 = g + n1 + h + (int64_t)h * c, *gw2 = g + n1 + h, *gb1 = g + n1;
    memset(g + n1, 0, sizeof(float) * (size - n1));
    for (int r = 0; r < q; r++) {
      float top = -1e30f, sum = 0;
      for (int k = 0; k < c; k++) { o[r * c + k] += b2[k]; top = fmaxf(top, o[r * c + k]); }
      for (int k = 0; k < c; k++) { o[r * c + k] = expf(o[r * c + k] - top); sum += o[r * c + k]; }
      for (int k = 0; k < c; k++) {
        o[r * c + k] = (o[r * c + k] / sum - (k == y[r])) / q;
        gb2[k] += o[r * c + k];
      }
    }
    spmm(p, bp, bi, bv, o, c, gu);
    for (int r = 0; r < p; r++)
      for (int i = 0; i < h; i++) {
        float d = 0;
        const float x = z[r * h + i];
        if (x > 0) {
          for (int k = 0; k < c; k++) {
            d += gu[r * c + k] * w2[i * c + k];
            gw2[i * c + k] += x * gu[r * c + k];
          }
          if (drop) d *= 2;
        }
        gz[r * h + i] = d;
        gb1[i] += d;
      }
    spmm(f, tp, ti, tv, gz, h, g);
    step++;
    adam(size, w, m, v, g, lr, wd, 1 - powf(0.9f, step), 1 - powf(0.999f, step));
  }
  free(z); free(u); free(o); free(gu); free(gz); free(g);
}

/* total += share * w */
void add(int64_t n, float share, const float *restrict w, float *restrict total) {
  for (int64_t i = 0; i < n; i++) total[i] += share * w[i];
}
