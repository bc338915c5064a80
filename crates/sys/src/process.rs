//! Children that do not outlive their parent, and processes that let others go first.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

use crate::pidfd::PidFd;

/// Makes the child receive SIGHUP when the thread that starts it ends: nobody is left who would
/// wait for it, or start it again.
///
/// The signal follows the *thread*, so the caller starts the child from one that lives as long
/// as the process should.
pub fn die_with_parent(command: &mut Command) -> &mut Command {
    let parent = std::process::id();
    // SAFETY: between fork and exec only async-signal-safe calls are made: prctl and getppid.
    unsafe {
        command.pre_exec(move || {
            if libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGHUP) != 0 {
                return Err(std::io::Error::last_os_error());
            }
            // In a background group, a terminal with `tostop` would stop whoever logs.
            libc::signal(libc::SIGTTOU, libc::SIG_IGN);
            // The parent may have died before prctl.
            if libc::getppid() as u32 != parent {
                return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
            }
            Ok(())
        })
    }
}

/// Sends SIGTERM to a process that may have ended already.
pub fn terminate(pid: u32) {
    if let Ok(pidfd) = PidFd::open(pid) {
        pidfd.terminate();
    }
}

/// Sends SIGTERM and waits; after the deadline, SIGKILL.
pub fn terminate_and_wait(child: &mut Child, deadline: Duration) {
    // Once it has been waited for, its number may be somebody else's.
    if child.try_wait().is_ok_and(|status| status.is_some()) {
        return;
    }
    if let Ok(pidfd) = PidFd::open(child.id()) {
        pidfd.terminate();
        if !pidfd.wait(deadline) {
            pidfd.kill();
        }
    }
    // Reaps it; it has ended or is about to.
    let _ = child.wait();
}

/// Makes this process nicer by so much: others go first where they want the same cores. By 5 it
/// has a third of their weight, and still gets a quarter of a core that another one wants for
/// itself. It holds for the calling thread and those it starts from now on; a system that refuses
/// leaves things as they are.
pub fn let_others_go_first(nicer: u8) {
    // SAFETY: no pointers, no memory.
    let _ = unsafe { libc::nice(nicer.into()) };
}
