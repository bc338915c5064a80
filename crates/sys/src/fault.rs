//! Faults of the device that a debug build can be told to have, for soaks.
//!
//! While the file named by `MATKV_FAULT_FILE` exists, operations of the kinds it names fail. A
//! test makes and removes it. In a release build there is nothing of this.

/// What can be made to fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// `write`: a chunk file finds the device full.
    Write,
}

impl Fault {
    #[cfg(debug_assertions)]
    const fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
        }
    }
}

/// The error this operation has been told to have.
pub fn fault(kind: Fault) -> Option<std::io::Error> {
    #[cfg(debug_assertions)]
    {
        use std::path::PathBuf;
        use std::sync::OnceLock;
        static FILE: OnceLock<Option<PathBuf>> = OnceLock::new();
        let file = FILE.get_or_init(|| std::env::var_os("MATKV_FAULT_FILE").map(PathBuf::from));
        let asked = std::fs::read_to_string(file.as_ref()?).ok()?;
        let Fault::Write = kind;
        asked
            .split_whitespace()
            .any(|word| word == kind.name())
            .then(|| std::io::Error::from_raw_os_error(libc::ENOSPC))
    }
    #[cfg(not(debug_assertions))]
    {
        let _ = kind;
        None
    }
}
