/* llmc_zero/gpt2_layout.cuh - where the parts of llm.c's tensors lie in the flat buffer.

   A segment is one layer's part of a tensor, a unit is a layer; unit 0 holds the embeddings, the last unit the final
   layernorm. The flat buffer is layer-major: layer l + 1 lies a constant distance behind layer l. The model index is
   llm.c's order (tensor by tensor), so model files keep their bytes. Part of gpt2.cuh, which includes it.
*/
#ifndef LLMC_ZERO_GPT2_LAYOUT_CUH_INCLUDED
#define LLMC_ZERO_GPT2_LAYOUT_CUH_INCLUDED

/* llm.c's tensors in its order. decays: only matrices and embeddings lose weight. columns: of a matrix, in channels;
   0: a vector. */
typedef struct ZeroGpt2Tensor {
    const char* name;
    int per_layer, decays, columns;
} ZeroGpt2Tensor;

static const ZeroGpt2Tensor zero_gpt2_tensors[] = {
    {"wte", 0, 1, 1},     {"wpe", 0, 1, 1},     {"ln1w", 1, 0, 0},     {"ln1b", 1, 0, 0},
    {"qkvw", 1, 1, 1},    {"qkvb", 1, 0, 0},    {"attprojw", 1, 1, 1}, {"attprojb", 1, 0, 0},
    {"ln2w", 1, 0, 0},    {"ln2b", 1, 0, 0},    {"fcw", 1, 1, 1},      {"fcb", 1, 0, 0},
    {"fcprojw", 1, 1, 4}, {"fcprojb", 1, 0, 0}, {"lnfw", 0, 0, 0},     {"lnfb", 0, 0, 0},
};
static_assert(
    sizeof(zero_gpt2_tensors) / sizeof(zero_gpt2_tensors[0]) == NUM_PARAMETER_TENSORS,
    "this llm.c has other parameter tensors: change zero_gpt2_tensors in llmc_zero/gpt2_layout.cuh alike");

static inline int zero_gpt2_layers(const ZeroGpt2* zero) { return zero->layout.units_count - 2; }

/* The segment of tensor i's part in a layer (the layer of a tensor that has none does not matter). */
static inline int zero_gpt2_segment(const ZeroGpt2* zero, int i, int layer) {
    return zero->first_segment[i] + (zero_gpt2_tensors[i].per_layer ? layer : 0);
}

static inline ZeroResult zero_gpt2_describe(GPT2* model, int ranks) {
    ZeroGpt2* zero = model->zero;
    const int layers = model->config.num_layers;
    const size_t segments_max = (size_t)NUM_PARAMETER_TENSORS * (size_t)(layers > 0 ? layers : 1);
    ZeroSegment* segments = (ZeroSegment*)calloc(segments_max, sizeof(ZeroSegment));
    ZeroLayoutConfig config = zero_layout_config(ranks, sizeof(floatX) == 2 ? ZERO_BF16 : ZERO_FP32);
    ZeroResult result = zero_ok();
    int count = 0;
    zero->names = (char(*)[32])calloc(segments_max, sizeof(*zero->names));
    config.units_apart = zero->settings.units_apart || zero->stage >= 2;
    config.bucket_bytes = (size_t)(zero->settings.bucket_mb * 1e6);
    if (zero->settings.bucket_mb > 0.0 && config.bucket_bytes == 0)
        config.bucket_bytes = 1; /* 0 is one bucket */
    if (!segments || !zero->names)
        result = zero_error(ZERO_ERROR_MEMORY, "no host memory for %zu segments", segments_max);
    if (layers < 1) result = zero_error(ZERO_ERROR_ARGUMENT, "%d layers; a model has at least 1", layers);
    for (int i = 0; i < NUM_PARAMETER_TENSORS && result.code == ZERO_OK; i++) {
        const ZeroGpt2Tensor* tensor = &zero_gpt2_tensors[i];
        const int parts = tensor->per_layer ? layers : 1;
        if (model->param_elements[i] % (size_t)parts != 0)
            result = zero_error(ZERO_ERROR_ARGUMENT,
                                "tensor %s has %zu elements, which %d layers cannot share: change "
                                "zero_gpt2_tensors in llmc_zero/gpt2_layout.cuh",
                                tensor->name, model->param_elements[i], parts);
        zero->first_segment[i] = count;
        for (int l = 0; l < parts; l++, count++) {
            const int unit = tensor->per_layer ? 1 + l : i < 2 ? 0 : 1 + layers;
            snprintf(zero->names[count], sizeof(*zero->names), tensor->per_layer ? "h.%2$d.%1$s" : "%s",
                     tensor->name, l);
            segments[count] =
                zero_segment(zero->names[count], model->param_elements[i] / (size_t)parts, unit);
            segments[count].decay_factor = tensor->decays ? 1.0f : 0.0f;
        }
    }
    if (result.code == ZERO_OK) result = zero_layout(&zero->layout, segments, count, &config);
    free(segments);
    return result;
}

/* model->params and model->grads become names: zero_gpt2_param and zero_gpt2_grad turn them into addresses. In stages
   0 to 2 (gradients: 0 and 1) they are those of layer 0, too. */
static inline void zero_gpt2_point(const ZeroGpt2* zero, ParameterTensors* tensors, void* flat) {
    floatX** pointers =
        (floatX**)tensors; /* llm.c asserts that it is an array of NUM_PARAMETER_TENSORS pointers */
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        pointers[i] = (floatX*)flat + zero->layout.segments[zero->first_segment[i]].flat_offset;
}

/* Which segment a pointer of model->params or model->grads (at layer 0) and a layer mean; -1: none. */
static inline int zero_gpt2_find(const ZeroGpt2* zero, const ParameterTensors* tensors, const floatX* first,
                                 size_t layer) {
    floatX* const* pointers = (floatX* const*)tensors;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++)
        if (pointers[i] == first &&
            layer < (size_t)(zero_gpt2_tensors[i].per_layer ? zero_gpt2_layers(zero) : 1))
            return zero_gpt2_segment(zero, i, (int)layer);
    zeroCheck(zero_error(ZERO_ERROR_ARGUMENT, "%p in layer %zu is no tensor of the model", (const void*)first,
                         layer));
    return -1;
}

/* Elements from where a unit begins to where it ends. */
static inline size_t zero_gpt2_unit_count(const ZeroGpt2* zero, int unit) {
    size_t end = 0;
    for (int i = 0; i < NUM_PARAMETER_TENSORS; i++) {
        const int per_layer = zero_gpt2_tensors[i].per_layer;
        const int s = zero_gpt2_segment(zero, i, per_layer && unit > 0 ? unit - 1 : 0);
        if (per_layer && (unit == 0 || unit > zero_gpt2_layers(zero))) continue;
        if (zero->layout.segments[s].unit != unit) continue;
        const size_t last = zero_unit_offset(&zero->layout, s) + zero->layout.segments[s].count;
        if (last > end) end = last;
    }
    return end;
}

/* llm.c's question where a tensor lies; the offset is into params_memory and grads_memory. */
static inline ShardInfo zero_gpt2_tensor_at_layer(const GPT2* model, int layer, int tensor) {
    const ZeroSegment* segment = &model->zero->layout.segments[zero_gpt2_segment(model->zero, tensor, layer)];
    return {(ptrdiff_t)segment->flat_offset, segment->count};
}

#endif /* LLMC_ZERO_GPT2_LAYOUT_CUH_INCLUDED */
