/* test/llmc_debug_state.c - makes the file that llm.c's test_gpt2.cu compares with, for a model of any size, with llm.c's
   own train_gpt2.c as the reference. Compiled with -I DIR, DIR being a checkout of llm.c:

       gcc -O3 -I DIR test/llmc_debug_state.c -lm -o debug_state
       ./debug_state MODEL.bin OUT.bin BATCH LENGTH

   MODEL.bin: fp32. The file holds tokens, targets, logits, loss and all gradients, in fp32. */
#define TESTING
#include "train_gpt2.c"

static void put(FILE* file, const void* data, size_t bytes) {
    if (fwrite(data, 1, bytes, file) != bytes) {
        perror("writing the debug state");
        exit(EXIT_FAILURE);
    }
}

int main(int argc, char** argv) {
    if (argc != 5) {
        fprintf(stderr, "usage: debug_state MODEL.bin OUT.bin BATCH LENGTH\n");
        return 2;
    }
    const int B = atoi(argv[3]), T = atoi(argv[4]);
    int header[256] = {20240327, 2, B, T};
    int* tokens = malloc((size_t)(B * T + 1) * sizeof(int));
    unsigned random = 1;
    GPT2 model;
    gpt2_build_from_checkpoint(&model, argv[1]);
    const size_t V = model.config.vocab_size, Vp = model.config.padded_vocab_size;
    for (int i = 0; i <= B * T; i++) {
        random = random * 1664525u + 1013904223u;
        tokens[i] = (int)((random >> 8) % V);
    }
    gpt2_forward(&model, tokens, tokens + 1, B, T);
    gpt2_zero_grad(&model);

    FILE* file = fopen(argv[2], "wb");
    if (!file) {
        perror(argv[2]);
        return 1;
    }
    put(file, header, sizeof(header));
    put(file, tokens, (size_t)(B * T) * sizeof(int));
    put(file, tokens + 1, (size_t)(B * T) * sizeof(int));
    for (int bt = 0; bt < B * T; bt++) put(file, model.acts.logits + (size_t)bt * Vp, V * sizeof(float));
    put(file, &model.mean_loss, sizeof(float));
    gpt2_backward(&model);
    put(file, model.grads_memory, model.num_parameters * sizeof(float));
    if (fclose(file) != 0) {
        perror(argv[2]);
        return 1;
    }
    printf("loss %.9g\n", model.mean_loss);
    return 0;
}
