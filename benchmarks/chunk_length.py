"""The cost of writing, sending and sampling by chunk length. See docs/decisions.md#chunk-length."""

from __future__ import annotations

import time

import numpy as np

from benchmarks.actors import Contender, ours
from benchmarks.comparison import Comparison, Effort, progress
from benchmarks.processes import TABLE, Server
from benchmarks.recording import record
from benchmarks.report import Table
from benchmarks.workloads import Workload, frame_steps, small_steps
from reverb_writer import Trajectory, WindowSpec
from reverb_writer.protocol import messages
from reverb_writer.protocol.chunk_length import chunk_length_for
from reverb_writer.transport.channel import Channel
from reverb_writer.transport.pipes import ByteStream

_LENGTH = 20
_STRIDES = (1, 5, 10, 20)
_CHUNK_LENGTHS = (1, 5, 10, 20, 40, 80)
_RECORDED_STEPS = 20_000


def chunk_length_small(effort: Effort) -> Table:
    """Chunk lengths, six small leaves."""
    return _measure("six small leaves", small_steps(), effort)


def chunk_length_frames(effort: Effort) -> Table:
    """Chunk lengths, frames."""
    return _measure("84 x 84 frames of Breakout", frame_steps(), effort)


def _measure(what: str, steps: Trajectory, effort: Effort) -> Table:
    rows = []
    for stride in _STRIDES:
        workload = Workload(steps, _LENGTH, stride)
        chosen = chunk_length_for(WindowSpec(_LENGTH, stride), workload.step_bytes)
        figures: dict[int, list[tuple[float, ...]]] = {length: [] for length in _CHUNK_LENGTHS}
        with Comparison() as comparison:
            for length in figures:
                comparison.add(str(length), Contender, ours, workload, chunk_length=length)
            for i in range(effort.rounds):
                for length, of in figures.items():
                    with comparison.turn(str(length), effort) as server:
                        run = comparison.write(str(length), server, effort.seconds)
                        of.append((run.steps_per_s, run.cpu_us_per_step, *_sample(server, effort)))
                progress(f"S={stride}: round {i + 1} of {effort.rounds}")
        with Server() as server:
            sent = {length: _bytes_per_step(server.address, workload, length) for length in figures}
        for length, of in figures.items():
            steps_per_s, cpu_us, samples_per_s, sample_cpu_us, bytes_per_sample, steps_per_sample = np.median(
                of, axis=0
            )
            rows.append(
                [
                    f"S={stride}, chunks of {length}{' (the rule)' if length == chosen else ''}",
                    f"{steps_per_s:,.0f}",
                    f"{cpu_us:.1f}",
                    f"{sent[length]:,.0f}",
                    f"{steps_per_sample / _LENGTH:.2f}",
                    f"{samples_per_s:,.0f}",
                    f"{sample_cpu_us:.1f}",
                    f"{bytes_per_sample:,.0f}",
                ]
            )
    columns = [
        "",
        "steps/s",
        "CPU, us/step",
        "bytes sent/step",
        "steps read/used",
        "samples/s",
        "CPU, us/sample",
        "bytes/sample",
    ]
    note = "CPU is the client's and the server's together. Samples are read off the raw stream, and not decoded."
    return Table(f"Chunk length, {what}, L={_LENGTH}", columns, rows, note)


def _bytes_per_step(address: str, workload: Workload, chunk_length: int) -> float:
    return sum(map(len, record(address, workload, _RECORDED_STEPS, chunk_length=chunk_length))) / _RECORDED_STEPS


def _sample(server: Server, effort: Effort) -> tuple[float, float, float, float]:
    """Return samples a second off the raw stream, and the CPU time, the bytes and the steps of a sample."""
    request = messages.SampleStreamRequest(table=TABLE, num_samples=1 << 30).SerializeToString()
    samples = num_bytes = num_steps = 0
    with Channel(server.address) as channel:
        cpu_s, start = time.process_time() + server.cpu_s(), time.perf_counter()
        stream = ByteStream(channel, messages.SAMPLE_STREAM)
        stream.send(request)
        while time.perf_counter() - start <= effort.seconds / 4:
            reply = stream.read()
            num_bytes += len(reply)
            for entry in messages.SampleStreamResponse.FromString(reply).entries:
                samples += entry.end_of_sequence
                num_steps += sum(1 + chunk.sequence_range.end - chunk.sequence_range.start for chunk in entry.data)
        wall_s = time.perf_counter() - start
        cpu_s = time.process_time() + server.cpu_s() - cpu_s
        stream.close()
    return samples / wall_s, 1e6 * cpu_s / samples, num_bytes / samples, num_steps / samples
