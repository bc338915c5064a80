//! Which cores a thread runs on.

use crate::error::{Result, SysError};

/// Binds the calling thread, the `i`th of a team, to the core whose turn it is; to none if none are
/// named.
///
/// # Errors
/// If the core does not exist, or is not this process's to use.
pub fn bind_thread(cores: &[usize], i: usize) -> Result<()> {
    let Some(&core) = cores.get(i % cores.len().max(1)) else { return Ok(()) };
    if core >= libc::CPU_SETSIZE as usize {
        return Err(SysError::Core { core, source: std::io::ErrorKind::InvalidInput.into() });
    }
    // SAFETY: a set of plain bits, in which the core has one; 0 is the calling thread.
    let rc = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(core, &mut set);
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set)
    };
    if rc == 0 {
        return Ok(());
    }
    Err(SysError::Core { core, source: std::io::Error::last_os_error() })
}

/// Whether threads can be bound to all of them.
///
/// # Errors
/// As [`bind_thread`], for the first that is refused.
pub fn check_cores(cores: &[usize]) -> Result<()> {
    let each = || (0..cores.len()).try_for_each(|i| bind_thread(cores, i));
    std::thread::scope(|scope| scope.spawn(each).join()).unwrap_or_else(|_| {
        Err(SysError::Control("the thread that tries the cores has panicked".into()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cores the calling thread may run on, as the kernel lists them.
    fn allowed() -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"));
        line.unwrap().trim().to_owned()
    }

    #[test]
    fn a_thread_is_bound_and_the_next_is_not() {
        let before = allowed();
        let first: usize = before.split(['-', ',']).next().unwrap().parse().unwrap();
        std::thread::spawn(move || {
            bind_thread(&[], 3).unwrap();
            bind_thread(&[first], 3).unwrap();
            assert_eq!(allowed(), first.to_string());
        })
        .join()
        .unwrap();
        check_cores(&[first, first]).unwrap();
        assert_eq!(allowed(), before, "the caller is bound to nothing");
    }

    #[test]
    fn a_core_that_does_not_exist_is_named() {
        for core in [1023, usize::MAX] {
            let e = check_cores(&[core]).unwrap_err().to_string();
            assert!(e.contains(&format!("core {core}")), "{e}");
        }
    }
}
