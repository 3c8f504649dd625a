/* Uses train_gpt2.cu's functions as llm.c's test_gpt2.cu does: gradients in the order of the tensors,
   updates without a norm before them, with a grad_scale and t of the caller's own; files, and behind them the
   same losses again.

     ./test_gpt2 FOLDER [-w 0]      exit code 0: all is well
   Writes FOLDER/gradsRANK.bin (floats) and the state of step 1, behind an update with them times 0.25.
*/
#define TESTING
#include "train_gpt2.cu"

static float train(GPT2* gpt, DataLoader* data, float scale, int t) {
    dataloader_next_batch(data);
    gpt2_forward(gpt, data->inputs, data->B, data->T);
    gpt2_backward_and_reduce(gpt, data->inputs, data->targets, 1, 0);
    if (scale == 0) {
        const float norm = gpt2_calculate_grad_norm(gpt, &multi_gpu_config);
        scale = norm > 1 ? 1 / norm : 1;
    }
    gpt2_update(gpt, 0.01f, 0.9f, 0.95f, 1e-8f, 0, scale, t, &multi_gpu_config);
    return gpt->mean_loss;
}

int main(int n, char** words) {
    const int B = 2, T = 16;
    char weights[300], state[300], grads[300], scaled[300], done[300];
    must(n > 1, "go on without", "FOLDER");
    multi_gpu_config = multi_gpu_config_init(1, 0, ".", "mpi");
    const int rank = multi_gpu_config.process_rank;
    snprintf(weights, sizeof weights, "%s/test%d.bin", words[1], rank);
    snprintf(state, sizeof state, "%s/state_00000041_%05d.bin", words[1], rank);
    snprintf(grads, sizeof grads, "%s/grads%d.bin", words[1], rank);
    snprintf(scaled, sizeof scaled, "%s/state_00000001_%05d.bin", words[1], rank);
    snprintf(done, sizeof done, "%s/DONE_00000041", words[1]);
    CUDA(cudaStreamCreate(&main_stream));

    GPT2 gpt;
    DataLoader data;
    gpt2_init_common(&gpt);
    gpt_build_from_descriptor(&gpt, "tiny:2x23");
    if (n > 3) gpt.use_master_weights = atoi(words[3]);
    set_zero_configs(&multi_gpu_config, 0, gpt.num_parameters);
    gpt2_allocate_state(&gpt, B, T);
    dataloader_init(&data, B, T, rank, multi_gpu_config.num_processes, 0);

    // gradients of the first batch
    dataloader_next_batch(&data);
    gpt2_forward(&gpt, data.inputs, B, T);
    gpt2_backward_and_reduce(&gpt, data.inputs, data.targets, 1, 0);
    floatX* host = (floatX*)mallocCheck(gpt.num_parameters_bytes);
    CUDA(cudaMemcpy(host, gpt.grads_memory,
                         gpt.num_parameters_bytes, cudaMemcpyDeviceToHost));
    FILE* out = fopenCheck(grads, "wb");
    for (size_t i = 0; i < gpt.num_parameters; i++) {
        const float one = (float)host[i];
        fwriteCheck(&one, sizeof one, 1, out);
    }
    fclose(out);
    free(host);

    float first = 0, last = 0, losses[2][6];
    gpt2_update(&gpt, 0, 0.9f, 0.95f, 1e-8f, 0, 0.25f, 1, &multi_gpu_config); // rate 0: only m and v change
    save_state(scaled, 1, &gpt, &data);
    for (int i = 0; i < 40; i++) {
        data.current_sample_idx = i % 4;
        const float loss = train(&gpt, &data, 0, i + 2);
        (i < 4 ? first : last) = i < 4 || i >= 36 ? (i < 4 ? first : last) + loss / 4 : 0;
    }
    gpt2_write_to_checkpoint(&gpt, weights);
    save_state(state, 41, &gpt, &data);
    if (rank == 0) fclose(fopenCheck(done, "w"));
    for (int again = 0; again < 2; again++) {
        int step = 41;
        if (again) {
            gpt2_free(&gpt);
            gpt2_build_from_checkpoint(&gpt, weights);
            gpt2_allocate_state(&gpt, B, T);
            load_state(&step, &gpt, &data, state);
        }
        for (int i = 0; i < 6; i++) losses[again][i] = train(&gpt, &data, 0.5f, step + 1 + i);
    }
    const bool learned = last < first - 0.2f, same = memcmp(losses[0], losses[1], sizeof losses[0]) == 0;
    printf("loss %g -> %g%s, then %.9g ... %.9g, again %.9g ... %.9g%s\n", first, last,
           learned ? "" : " WRONG", losses[0][0], losses[0][5], losses[1][0], losses[1][5],
           same ? "" : " WRONG");
    gpt.config.num_layers = 1; // as profile_gpt2.cu does: only one layer runs
    must(isfinite(train(&gpt, &data, 0, 50)), "train", "one layer");
    remove(weights);
    remove(state);
    dataloader_free(&data);
    gpt2_free(&gpt);
    multi_gpu_config_free(&::multi_gpu_config);
    return learned && same ? EXIT_SUCCESS : EXIT_FAILURE;
}
