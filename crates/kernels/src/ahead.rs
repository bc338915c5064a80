//! Memory asked for before it is needed: the hardware's own prefetch ends with every small page.

/// Which cache lines come to.
#[derive(Clone, Copy)]
pub(crate) enum To {
    /// The first.
    L1,
    /// The second, for what is needed later.
    L2,
}

/// Asks for the lines of some bytes, which need not exist.
#[inline(always)]
pub(crate) fn ahead(to: To, from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let line = from.wrapping_add(at).cast();
        // SAFETY: a hint; it reads nothing and cannot fault.
        unsafe {
            match to {
                To::L1 => _mm_prefetch::<_MM_HINT_T0>(line),
                To::L2 => _mm_prefetch::<_MM_HINT_T1>(line),
            }
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (to, from, bytes);
}
