"""Tables of docs/gpu_results.md, of what first_day.sh has measured: benchmarks/report.py makes them."""

from __future__ import annotations

from shared.table import Cell, Columns, Row, Table, last_of_each, number, told


def last_cases(lines: list[Row], _: list[str]) -> list[Row]:
    """The last line of each case, without those that were refused."""

    def key(row: Row) -> tuple[object, ...]:
        return row.get("kernel"), row["case"], row["shape"], row["tokens"], row["dtype"]

    return [row for row in last_of_each(lines, key) if "refused" not in row]


def spread(key: str) -> Cell:
    """A median with its 20th and 80th percentile."""
    return lambda row: f"{row[f'{key}_ms']:.1f} ({row[f'{key}_p20_ms']:.1f} - {row[f'{key}_p80_ms']:.1f})"


def calls(*names: str) -> Cell:
    """How often the host called these functions, and what that took."""

    def cell(row: Row) -> str:
        found = [row["calls"][name] for name in names if name in row["calls"]]
        return f"{sum(count for count, _ in found):.0f}: {sum(us for _, us in found) / 1e3:.1f}"

    return cell


STEP: Columns = {
    "case": told("case"),
    "tokens": number("tokens"),
    "forward and backward, ms": spread("forward_backward"),
    "over plain": number("ratio", 3),
    "host, ms": number("host_ms", 1),
    "optimizer, ms": number("optimizer_ms", 1),
}
SUMS: Columns = {
    "k": number("k"),
    "16-bit result, us": number("t_16_bits_us", 1),
    "float32 result, us": number("t_beta0_us", 1),
    "added to, us": number("t_beta1_us", 1),
    "added / written": number("ratio", 2),
    "what it reads more, GB/s": number("extra_gb_per_s"),
    "torch's addmm, us": number("t_torch_add_us", 1),
}
PRODUCTS: Columns = {
    "weight": told("shape"),
    "tokens": number("tokens"),
    "recipe": told("recipe"),
    "product, us": number("t_us", 1),
    "TFLOP/s": number("tflops"),
    "exact accumulation, us": number("t_exact_us", 1),
    "codes of tokens, us": number("t_tokens_us", 1),
    "codes of the weight, us": number("t_weight_us", 1),
    "transposing them, us": number("t_turn_us", 1),
}
KERNELS: Columns = {
    "kernel": told("kernel", "`{}`"),
    "case": told("case"),
    "shape": told("shape"),
    "dtype": told("dtype"),
    "us": number("t_us", 1),
    "GB/s": number("gb_per_s"),
    "of a copy's rate": number("fraction", 2),
}
CALLS: Columns = {
    "case": told("case"),
    "host, ms": number("host_ms", 1),
    "kernels": calls("cudaLaunchKernel", "cuLaunchKernel", "cuLaunchKernelEx"),
    "copies, fills": calls("cudaMemcpyAsync", "cudaMemsetAsync"),
    "waits for events": calls("cudaStreamWaitEvent"),
    "records of events": calls("cudaEventRecord"),
}
HOSTS: Columns = {
    "link": told("link"),
    "a hop, us": number("host_us_per_hop", 1),
    "forward, us": number("host_us_forward"),
    "as a graph, us": number("graph_us_forward"),
    "forward and backward, us": number("host_us_step"),
    "as graphs, us": number("graph_us_step"),
    "`torch.mm`, us": number("plain_us", 1),
}
FACTS: Columns = {
    "check": told("test"),
    "hops by": lambda row: row.get("link") or row.get("transport"),
    "pass or bundle": lambda row: str(row.get("pass_", row.get("bundle", ""))),
    "hops complete": told("completes"),
    "hops hidden": number("hidden", 2),
    "waiting, us": number("waiting", 1, 1e-6),
    "passes replayed": number("replayed"),
    "error": told("error"),
    "after, s": number("seconds", 2),
}
TABLES = {
    "gpu-facts": Table(
        "first_day", FACTS, lambda lines, _: [row for row in lines if row["test"][0] != "_"], machine=False
    ),
} | {
    f"gpu-{name}": Table(file, columns, last_cases, machine=False)
    for name, file, columns in (
        ("step", "emulated_step", STEP),
        ("sums", "sums", SUMS),
        ("products8", "products8", PRODUCTS),
        ("kernels", "kernels", KERNELS),
        ("calls", "host_calls", CALLS),
        ("host", "host_times", HOSTS),
    )
}
