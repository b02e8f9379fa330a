"""Texts as frameworks print them, with made-up numbers, and what they say."""

from __future__ import annotations

from typing import Any

GIB = 2.0**30
MEGATRON = (
    " [2026-03-01 10:00:0{0}] iteration {0:8d}/      20 | consumed samples: {1:12d} |"
    " elapsed time per iteration (ms): {2} | throughput per GPU (TFLOP/s/GPU): {3} |"
    " learning rate: 3.000000E-05 | global batch size:    32 | lm loss: {4:.6E} | loss scale: 1.0 |"
    " grad norm: {5} | num zeros: 7 | number of skipped iterations:   0 |"
    " number of nan iterations:   0 |"
)
TRAINER = "{{'loss': {}, 'grad_norm': {}, 'learning_rate': '2e-05', 'epoch': {}}}"

#: Format: its lines, and of each step its number and what must stand in it.
SAMPLES: dict[str, tuple[str, list[tuple[int, dict[str, Any]]]]] = {
    "megatron": (
        "\n".join(
            MEGATRON.format(step, 32 * step, f"{ms:.1f}", 401.5, loss, 1.25)
            for step, ms, loss in ((3, 812.5, 2.75), (4, 811.0, 2.5))
        ),
        [
            (3, {"milliseconds": 812.5, "loss": 2.75, "grad_norm": 1.25, "num zeros": 7.0}),
            (4, {"milliseconds": 811.0, "loss": 2.5, "teraflops_per_device": 401.5}),
        ],
    ),
    "automodel": (
        "2026-08-11 10:00:20 | INFO | root | step 0 | epoch 0 | loss 1.9000 | grad_norm 2.1250 |"
        " lr 1.00e-05 | mem 40.50 GiB | tps 8000.00(1000.00/gpu) | num_label_tokens 16400\n"
        '2026-08-11 10:00:50 | INFO | root | [val] name "default" | step 0 | epoch 0 | loss 9.0000'
        " | lr 1.00e-05 | num_label_tokens 99\n"
        "2026-08-11 10:01:20 | INFO | root | step 1 | epoch 0 | loss 1.7500 | grad_norm 2.0000 |"
        " lr 1.00e-05 | mem 41.00 GiB | tps 8800.00(1100.00/gpu) | num_label_tokens 16300",
        [
            (0, {"loss": 1.9, "device_peak_bytes": 40.5 * GIB, "tokens": 16400}),
            (
                1,
                {"loss": 1.75, "tokens_per_second_per_device": 1100.0, "tokens_per_second": 8800.0},
            ),
        ],
    ),
    "torchtitan": (
        "[titan] 2026-05-18 16:04:41,101 - root - INFO - step:  1  loss:  8.10250  grad_norm:"
        "  1.6120  memory:  9.50GiB(64.99%)  tps: 1,102  tflops: 80.52  mfu: 8.17%\n"
        "[titan] 2026-05-18 16:04:42,101 - root - INFO - step:  2  loss:  7.78125  grad_norm:"
        "  1.4801  memory:  9.50GiB(64.99%)  tps: 7,291  tflops: 81.52  mfu: 8.27%",
        [
            (1, {"loss": 8.1025, "grad_norm": 1.612, "tokens_per_second_per_device": 1102.0}),
            (2, {"device_reserved_peak_bytes": 9.5 * GIB, "memory %": 64.99, "mfu": 8.27}),
        ],
    ),
    "nemo": (
        "Training epoch 0, iteration 0/9 | lr: 0.0006 | consumed_samples: 32 |"
        " global_batch_size: 32 | global_step: 0 | reduced_train_loss: 11.02 |"
        " train_step_timing in s: 3.25\n"
        "Training epoch 0, iteration 1/9 | lr: 0.0006 | consumed_samples: 64 |"
        " global_batch_size: 32 | global_step: 1 | reduced_train_loss: 9.761 |"
        " train_step_timing in s: 0.5",
        [(1, {"loss": 11.02, "milliseconds": 3250.0}), (2, {"loss": 9.761, "milliseconds": 500.0})],
    ),
    "deepspeed": (
        "[2026-01-02 03:04:05,006] [INFO] [logging.py:128:log_dist] [Rank 0] step=10, skipped=1,"
        " lr=[3e-05], mom=[(0.9, 0.95)]\n"
        "[2026-01-02 03:04:05,007] [INFO] [timer.py:264:stop] epoch=0/micro_step=20/global_step=10,"
        " RunningAvgSamplesPerSec=81.5, CurrSamplesPerSec=82.5, MemAllocated=0.5GB,"
        " MaxMemAllocated=9.25GB\n"
        "steps: 11 loss: 2.5000 iter time (s): 1.250 samples/sec: 25.6",
        [
            (10, {"learning_rate": 3e-5, "device_peak_bytes": 9.25 * GIB, "skipped in total": 1.0}),
            (11, {"loss": 2.5, "milliseconds": 1250.0}),
        ],
    ),
    "trainer": (
        TRAINER.format("'1.5'", "'4.75'", "'0.25'") + "\n" + TRAINER.format(1.25, 4.5, 0.5),
        [(1, {"loss": 1.5, "grad_norm": 4.75}), (2, {"loss": 1.25, "learning_rate": 2e-5})],
    ),
    "verl": (
        "(TaskRunner pid=7) step:1 - actor/entropy:0.25 - actor/pg_loss:np.float64(0.0125) -"
        " actor/grad_norm:0.5 - perf/max_memory_allocated_gb:62.5 - actor/lr:1e-06 -"
        " timing_s/gen:40.5 - perf/total_num_tokens:4096 - perf/time_per_step:101.5 -"
        " perf/throughput:812.5\n"
        "(TaskRunner pid=7) step:2 - actor/entropy:0.25 - actor/pg_loss:-0.0250 -"
        " actor/grad_norm:0.25 - perf/max_memory_allocated_gb:62.5 - actor/lr:1e-06 -"
        " timing_s/gen:40.5 - perf/total_num_tokens:4096 - perf/time_per_step:99.5 -"
        " perf/throughput:813.5",
        [
            (1, {"loss": 0.0125, "milliseconds": 101500.0, "device_peak_bytes": 62.5 * GIB}),
            (2, {"loss": -0.025, "tokens_per_second_per_device": 813.5, "tokens": 4096}),
        ],
    ),
    "nanotron": (
        "10/17/2025 16:31:56 [INFO|DP=0|PP=0|TP=0]: iteration: 7 / 3780 | consumed_tokens: 85.8G |"
        " elapsed_time_per_iteration_ms: 11.5K | tokens_per_sec: 22.8K |"
        " tokens_per_sec_per_gpu: 11.4K | global_batch_size: 64 | lm_loss: 2.38 | lr: 1e-05 |"
        " model_tflops_per_gpu: 38.3 | hardware_tflops_per_gpu: 38.5 | grad_norm: 1.25 |"
        " cuda_max_memory_reserved: 547M\n"
        "10/17/2025 16:32:07 [INFO|DP=0|PP=0|TP=0]: iteration: 8 / 3780 | consumed_tokens: 85.8G |"
        " time_per_iteration_ms: 950 | tokens_per_sec: 22.8K |"
        " tokens_per_sec_per_gpu: 11.5K | global_batch_size: 64 | lm_loss: 2.25 | lr: 1e-05 |"
        " model_tflops_per_gpu: 38.3 | hardware_tflops_per_gpu: 38.5 | grad_norm: 1.5",
        [
            (7, {"milliseconds": 11500.0, "device_reserved_peak_bytes": 547000000}),
            (8, {"milliseconds": 950.0, "loss": 2.25, "tokens_per_second_per_device": 11500.0}),
        ],
    ),
    "maxtext": (
        "completed step: 9, seconds: 5.625, TFLOP/s/device: 134.875, Tokens/s/device: 8672.75,"
        " total_weights: 196608, loss: 10.375\n"
        "completed step: 10, seconds: 5.5, TFLOP/s/device: 134.75, Tokens/s/device: 8675.5,"
        " total_weights: 196608, loss: 10.25",
        [
            (9, {"milliseconds": 5625.0, "teraflops_per_device": 134.875}),
            (10, {"loss": 10.25, "tokens_per_second_per_device": 8675.5}),
        ],
    ),
    "composer": (
        "[batch=366/480]:\n\t Train time/batch: 365\n\t Train memory/peak_allocated_mem: 44.5000\n"
        "\t Train loss/train/total: 10.3750\n\t Train throughput/device/tokens_per_sec: 1250.5\n"
        "[batch=367/480]:\n\t Train time/batch: 366\n\t Train loss/train/total: 10.2500",
        [
            (366, {"loss": 10.375, "device_peak_bytes": 44500000000, "time/batch": 365.0}),
            (367, {"loss": 10.25, "device_peak_bytes": None}),
        ],
    ),
    "jsonl": (
        '{"step": 0, "epoch": 0, "loss": 2.5, "grad_norm": 1.5, "tps_per_gpu": 100.5}\n'
        '{"step": 1, "epoch": 0, "loss": 2.25, "grad_norm": 1.25, "tps_per_gpu": 101.5}',
        [(0, {"loss": 2.5}), (1, {"grad_norm": 1.25, "tokens_per_second_per_device": 101.5})],
    ),
    "pairs": (
        "iter 0: loss 4.0875, time 561.5ms, mfu 17.5%\niter 1: loss 3.75, time 1.25s, mfu 17.5%",
        [(0, {"loss": 4.0875, "milliseconds": 561.5}), (1, {"milliseconds": 1250.0, "mfu": 17.5})],
    ),
}
