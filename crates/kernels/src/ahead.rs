//! Memory asked for before it is needed: the hardware's own prefetch ends with every small page.

/// Asks for the lines of some bytes, which need not exist, in L2: L1 has few places for lines on
/// their way, too few to keep memory busy, and other loads wait for one of them.
#[inline(always)]
pub(crate) fn ahead(from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    for at in (0..bytes).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint; it reads nothing and cannot fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(at).cast()) }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (from, bytes);
}
