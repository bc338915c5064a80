//! Standard output whose reader may go away: `matkv docs ls | head -1` is no error.

use std::fmt::Arguments;
use std::io::Write;

/// Writes and flushes; a closed pipe ends the program quietly, as it does other filters.
pub fn write(text: Arguments<'_>) {
    let mut out = std::io::stdout().lock();
    if let Err(e) = out.write_fmt(text).and_then(|()| out.flush()) {
        if e.kind() == std::io::ErrorKind::BrokenPipe {
            std::process::exit(0);
        }
        eprintln!("matkv: cannot write to standard output: {e}");
        std::process::exit(1);
    }
}

/// A line on standard output.
macro_rules! say {
    () => { $crate::out::write(format_args!("\n")) };
    ($($arg:tt)*) => { $crate::out::write(format_args!("{}\n", format_args!($($arg)*))) };
}

/// Text on standard output.
macro_rules! say_part {
    ($($arg:tt)*) => { $crate::out::write(format_args!($($arg)*)) };
}

pub(crate) use {say, say_part};
