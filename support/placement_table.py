"""A placement (support/placement.py) in words: what lives where and why, and what it costs."""

import argparse
from itertools import groupby

from support.flags import amount, count
from support.placement import (
    WHERE,
    Away,
    Part,
    Placement,
    Rates,
    Work,
    shown,
)

WHY = {
    Away.NOTHING: "the budget has room for it",
    Away.STATE: "state leaves first: touched once a step",
    Away.GRADIENTS: "gradients next: copied once a micro-batch",
    Away.WEIGHTS: "weights last: copied twice a micro-batch",
}
OUTSIDE = "embeddings, heads: after all blocks"
HEAD = ("", "parameters", "weights", "gradients", "state", "on device", "on host", "why")


def table(placement: Placement) -> str:
    """One line for neighbours that fare alike, then what stays, the copies and the sum."""
    rows = [HEAD]
    pairs = zip(placement.parts, placement.away, strict=True)
    for (away, is_block), found in groupby(pairs, lambda pair: (pair[1], bool(pair[0].layers))):
        parts = [part._replace(small=0) for part, _ in found]
        name = named(parts)
        on_device = sum(placement.on_device(part, away) for part in parts)
        on_host = sum(placement.on_host(part, away) for part in parts)
        why = WHY[away] if is_block or not away else OUTSIDE
        rows.append(row(name, sum(part.numel for part in parts), away, on_device, on_host, why))
    smalls = [part._replace(numel=0, state_bytes=0) for part in placement.parts]
    small = sum(part.small for part in smalls)
    on_device = sum(placement.on_device(part, Away.NOTHING) for part in smalls)
    why = "small, and used all the time"
    if small:
        rows.append(row("norms, biases", small, Away.NOTHING, on_device, 0, why))
    passing, slots = shown(placement.in_passing), shown(2 * placement.slot_bytes)
    rows.append(("copies on the way", "", "", "", "", passing, slots, placement.what_passes))
    total = small + sum(part.numel for part in placement.parts)
    held = shown(placement.device_bytes), shown(placement.host_bytes)
    rows.append(("in all", f"{total:,}", "", "", "", *held, f"budget: {shown(placement.budget)}"))
    form = "{:<17} {:>13} {:>7} {:>9} {:>6} {:>11} {:>11}  {}"
    return "\n".join(form.format(*cells).rstrip() for cells in rows)


def named(parts: list[Part]) -> str:
    """Example: h.3; h.0 to h.5; 3 of h.0 to h.5, where the other layers are not there yet"""
    first, last = parts[0], parts[-1]
    if first is last:
        return first.name
    span = f"{first.name} to {last.name}"
    layers = [part.layers[0] for part in parts]
    return span if len(parts) == layers[-1] - layers[0] + 1 else f"{len(parts)} of {span}"


def row(name: str, numel: int, away: Away, on_device: int, on_host: int, why: str) -> tuple:
    return (name, f"{numel:,}", *WHERE[away], shown(on_device), shown(on_host), why)


def price(placement: Placement, work: Work, rates: Rates) -> str:
    """What a step pays for it, in bytes and seconds, and whether fetched weights can hide."""
    cost = placement.traffic(work)
    home, back = (f"{shown(n)} ({n / rates.link:.3g} s)" for n in (cost.to_host, cost.to_device))
    moved = f"{cost.on_host:,} parameters ({cost.on_host / rates.adamw:.3g} s of AdamW)"
    said = (
        f"a step of {work.micro_batches:,} micro-batches copies {home} to the host and {back} to"
        f" the device,\n  and moves {moved} on the host"
    )
    if Away.WEIGHTS not in placement.away:
        return said
    again = f"{cost.flops:.3g} FLOPs ({cost.flops / rates.flops:.3g} s)"
    least, tokens = placement.break_even_tokens(rates), work.micro_batch_tokens
    hides = "is hidden behind" if tokens >= least else "takes longer than"
    return (
        f"{said}, and computes {again} once more\n"
        f"a micro-batch has {tokens:,} tokens, break-even is {least:,.0f}"
        f" ({rates.flops:.3g} FLOP/s, {rates.link:.3g} bytes/s):\n"
        f"  copying a block's weights {hides} computing with them"
    )


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The placement that is asked for, and what is known of a machine that is not this one."""
    parser.add_argument("--budget", required=True, help="device memory: 6GiB, 800MB, auto")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--micro-batch-tokens", type=count, help="at once (default: a row)")
    parser.add_argument("--link", type=amount, help="bytes/s to the device (default: measured)")
    parser.add_argument("--flops", type=amount, help="FLOP/s on the device (default: measured)")


def show(args: argparse.Namespace, placement: Placement, here: Rates) -> None:
    rates = here._replace(link=args.link or here.link, flops=args.flops or here.flops)
    tokens = args.micro_batch_tokens or args.seq_len
    print(f"{table(placement)}\n")
    print(price(placement, Work(tokens, -(-args.batch_tokens // tokens)), rates))
