//! Watching another process by pidfd: unlike a pid, it cannot come to mean someone else.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::{Result, SysError};

/// A handle to a process.
pub struct PidFd(OwnedFd);

impl PidFd {
    /// Opens a handle to a live process.
    ///
    /// # Errors
    /// If there is no such process.
    pub fn open(pid: u32) -> Result<Self> {
        // SAFETY: no memory is passed.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, 0) };
        if fd < 0 {
            return Err(SysError::last("pidfd_open"));
        }
        // SAFETY: a fresh descriptor nobody else owns.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// Waits for the process to end; false if it still lives when the time is over.
    pub fn wait(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut poll =
                libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN, revents: 0 };
            let millis = i32::try_from(left.as_millis()).unwrap_or(i32::MAX);
            // SAFETY: one valid pollfd.
            match unsafe { libc::poll(&raw mut poll, 1, millis) } {
                1.. => return true,
                0 => return false,
                // EINTR: a signal is no news of the other process.
                _ if left.is_zero() => return false,
                _ => {}
            }
        }
    }

    /// Sends SIGKILL.
    pub fn kill(&self) {
        self.signal(libc::SIGKILL);
    }

    /// Sends SIGTERM.
    pub fn terminate(&self) {
        self.signal(libc::SIGTERM);
    }

    fn signal(&self, signal: libc::c_int) {
        let (fd, none) = (self.0.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
        // SAFETY: a valid pidfd, no siginfo.
        unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, signal, none, 0) };
    }
}
