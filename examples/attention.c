/* Attention forward and backward for one query head at a time, float32, as a first kernel in C looks.
   query, output, grad_output, grad_query: (L, E); key, value, grad_key, grad_value: (S, E); lse: (L).
   Gradients of key and value are added to what is there, so that the heads of a group sum up. */

#include <math.h>
#include <stdlib.h>

static int first_hidden(int row, int keys, int is_causal)
{
    return is_causal && row + 1 < keys ? row + 1 : keys;
}

static void scores_of_row(const float *query, const float *key, int seen, int size, float scale, float *scores)
{
    for (int j = 0; j < seen; j++) {
        float sum = 0;
        for (int e = 0; e < size; e++)
            sum += scale * query[e] * key[j * size + e];
        scores[j] = sum;
    }
}

void attention_forward(const float *query, const float *key, const float *value, float *output, float *lse,
                       int rows, int keys, int size, float scale, int is_causal)
{
    float *scores = malloc(sizeof(float) * (keys + 1));
    for (int i = 0; i < rows; i++) {
        int seen = first_hidden(i, keys, is_causal);
        scores_of_row(query + i * size, key, seen, size, scale, scores);
        float largest = -INFINITY, sum = 0;
        for (int j = 0; j < seen; j++)
            largest = fmaxf(largest, scores[j]);
        for (int j = 0; j < seen; j++)
            sum += expf(scores[j] - largest);
        lse[i] = largest + logf(sum);
        for (int e = 0; e < size; e++) {
            float total = 0;
            for (int j = 0; j < seen; j++)
                total += expf(scores[j] - largest) * value[j * size + e];
            output[i * size + e] = total / sum;
        }
    }
    free(scores);
}

void attention_backward(const float *query, const float *key, const float *value, const float *output,
                        const float *lse, const float *grad_output, float *grad_query, float *grad_key,
                        float *grad_value, int rows, int keys, int size, float scale, int is_causal)
{
    float *scores = malloc(sizeof(float) * (keys + 1));
    for (int i = 0; i < rows; i++) {
        int seen = first_hidden(i, keys, is_causal);
        const float *q = query + i * size, *upstream = grad_output + i * size;
        float *grad_q = grad_query + i * size;
        scores_of_row(q, key, seen, size, scale, scores);
        float row_dot = 0;
        for (int e = 0; e < size; e++) {
            row_dot += upstream[e] * output[i * size + e];
            grad_q[e] = 0;
        }
        for (int j = 0; j < seen; j++) {
            const float *k = key + j * size, *v = value + j * size;
            float weight = expf(scores[j] - lse[i]), grad_weight = 0;
            for (int e = 0; e < size; e++)
                grad_weight += upstream[e] * v[e];
#ifdef FORGET_ROW_DOT
            float grad_score = weight * grad_weight;
#else
            float grad_score = weight * (grad_weight - row_dot);
#endif
            for (int e = 0; e < size; e++) {
                grad_q[e] += scale * grad_score * k[e];
                grad_key[j * size + e] += scale * grad_score * q[e];
                grad_value[j * size + e] += weight * upstream[e];
            }
        }
    }
    free(scores);
}
