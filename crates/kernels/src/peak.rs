//! How fast this machine multiplies at most: what the speed of a product is held against.

use std::time::Instant;

use matkv_types::Precision;

use crate::isa::{Isa, dispatch};
use crate::lanes::{LANES, Lanes};
use crate::product::{DotBf16, Exact, Product};
use crate::team;

/// Chains that run side by side: more than latency times throughput on every known core.
const CHAINS: usize = 16;
/// Links of each chain, a few tens of milliseconds.
const LINKS: usize = 4 << 20;

struct Run<P: Product> {
    a: [P::A; 2],
    b: [P::B; 2 * LANES],
    out: [f32; LANES],
}

#[inline(always)]
unsafe fn chains_body<L: Lanes, P: Product<Row = ()>>(run: &mut Run<P>) {
    // SAFETY: the operands have the sizes of one step.
    unsafe {
        let b = P::load::<L>(run.b.as_ptr());
        let mut sums = [P::zero::<L>(); CHAINS];
        for _ in 0..LINKS {
            for sum in &mut sums {
                *sum = P::step::<L>(*sum, run.a.as_ptr(), b);
            }
        }
        let total = sums
            .into_iter()
            .fold(L::splat(0.0), |t, s| L::add(t, P::finish::<L>(s, P::zero::<L>(), ())));
        L::store(run.out.as_mut_ptr(), total);
    }
}

dispatch! {
    /// Chains of steps on registers.
    unsafe fn chains<P: Product<Row = ()>> => chains_body(run: &mut Run<P>)
}

fn measure<P: Product<Row = ()>>(isa: Isa, a: P::A, b: P::B) -> f64 {
    let threads = team::threads();
    let best = (0..4).map(|_| {
        let started = Instant::now();
        team::for_each(threads, |_| {
            let mut run = Run::<P> { a: [a; 2], b: [b; 2 * LANES], out: [0.0; LANES] };
            // SAFETY: `isa` is one this CPU has; nothing else is asked for.
            unsafe { chains(isa, &mut run) };
            std::hint::black_box(run.out);
        });
        started.elapsed().as_secs_f64()
    });
    let work = (threads * LINKS * CHAINS * 4 * LANES) as f64;
    work / best.fold(f64::INFINITY, f64::min)
}

/// Floating-point operations a second on registers, all threads of the team together.
pub fn peak_flops(isa: Isa, precision: Precision) -> f64 {
    match precision {
        Precision::Exact => measure::<Exact<f32>>(isa, 1.0, 1.0),
        // 1.0 in bf16.
        Precision::Bf16 => measure::<DotBf16>(isa, 0x3f80, 0x3f80),
    }
}
