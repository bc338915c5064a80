//! Which instruction set the kernels run on, decided once per process.

use std::sync::OnceLock;

/// An instruction set this CPU has. Values come from [`Isa::available`] and [`Isa::detect`] only,
/// which is what makes running a kernel on one sound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Isa(pub(crate) Kind);

/// The sets the kernels have a version for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Plain Rust: sixteen-element arrays.
    Portable,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// AVX-512 F, BW, DQ, VL.
    Avx512,
    /// The same with BF16 and VNNI: dot products of pairs of 16 bits and of four bytes.
    Avx512Dot,
}

impl Isa {
    /// The best set this CPU has, or the one `MATKV_ISA` names if the CPU has it.
    pub fn detect() -> Self {
        static ISA: OnceLock<Isa> = OnceLock::new();
        *ISA.get_or_init(|| {
            let wanted = std::env::var("MATKV_ISA").ok();
            Self::available()
                .into_iter()
                .find(|isa| wanted.as_deref().is_none_or(|w| isa.name() == w))
                .unwrap_or(Self(Kind::Portable))
        })
    }

    /// Every set this CPU can run, best first.
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
            {
                if is_x86_feature_detected!("avx512bf16") && is_x86_feature_detected!("avx512vnni")
                {
                    sets.push(Self(Kind::Avx512Dot));
                }
                sets.push(Self(Kind::Avx512));
            }
            if avx2 {
                sets.push(Self(Kind::Avx2));
            }
        }
        sets.push(Self(Kind::Portable));
        sets
    }

    /// Name in reports and in `MATKV_ISA`.
    pub fn name(self) -> &'static str {
        match self.0 {
            Kind::Portable => "portable",
            Kind::Avx2 => "avx2",
            Kind::Avx512 => "avx512",
            Kind::Avx512Dot => "avx512-bf16",
        }
    }
}

/// Defines `fn $name(isa, args…)` that runs `$body::<L>` compiled for the given instruction set;
/// with a type parameter `T`, `$body::<L, T>`.
macro_rules! dispatch {
    (
        $(#[$doc:meta])* $vis:vis unsafe fn $name:ident $(<$t:ident: $bound:path>)? =>
        $body:ident ($($arg:ident: $ty:ty),* $(,)?)
    ) => {
        $(#[$doc])*
        $vis unsafe fn $name $(<$t: $bound>)? (isa: $crate::isa::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn avx2 $(<$t: $bound>)? ($($arg: $ty),*) {
                // SAFETY: same contract as the caller's; the feature is enabled here.
                unsafe { $body::<$crate::lanes_avx2::Avx2 $(, $t)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
            unsafe fn avx512 $(<$t: $bound>)? ($($arg: $ty),*) {
                // SAFETY: same contract as the caller's; the features are enabled here.
                unsafe { $body::<$crate::lanes_avx512::Avx512<false> $(, $t)?>($($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(
                enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vnni,avx2,fma,f16c"
            )]
            unsafe fn avx512_dot $(<$t: $bound>)? ($($arg: $ty),*) {
                // SAFETY: same contract as the caller's; the features are enabled here.
                unsafe { $body::<$crate::lanes_avx512::Avx512<true> $(, $t)?>($($arg),*) }
            }
            match isa.0 {
                // SAFETY: `Isa` values come from `Isa::available`, which
                // checks the CPU; the rest of the contract is the caller's.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx512Dot => unsafe { avx512_dot $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx512 => unsafe { avx512 $(::<$t>)? ($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $crate::isa::Kind::Avx2 => unsafe { avx2 $(::<$t>)? ($($arg),*) },
                // SAFETY: needs no CPU feature; the rest of the contract is the caller's.
                _ => unsafe { $body::<$crate::lanes::Portable $(, $t)?>($($arg),*) },
            }
        }
    };
}
pub(crate) use dispatch;
