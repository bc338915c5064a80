//! How fast this machine does things, as measured while it does them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Bytes from flash, read and verified.
    Flash,
    /// Bytes from the cold tier.
    Cold,
    /// Bytes decoded.
    Decode,
    /// Rows computed.
    Compute,
}

const KINDS: usize = 4;
/// Weight of a new measurement.
const WEIGHT: f64 = 0.2;
/// Of so many chunks that would be skipped one is loaded all the same: what was slow may be fast.
const TRIAL: u32 = 32;

#[derive(Clone, Copy, Debug, Default)]
struct Rate {
    /// Seconds of one byte, or row; 0 before anything was measured.
    seconds_per_unit: f64,
    measurements: u32,
}

/// Measured rates.
#[derive(Default)]
pub(crate) struct Rates {
    /// How many times as long as computing a load may take before a chunk is computed: a load
    /// leaves the cores to others, and estimates of short times are rough. 0: as long as it likes.
    patience: u32,
    rates: Mutex<[Rate; KINDS]>,
    /// When the last of each kind ended.
    ended: Mutex<[Option<Instant>; KINDS]>,
    skipped: Mutex<u32>,
}

impl Rates {
    /// Nothing measured yet.
    pub fn new(patience: u32) -> Self {
        Self { patience, ..Self::default() }
    }

    /// Takes a measurement in.
    pub fn measured(&self, kind: Kind, units: u64, spent: Duration) {
        if units == 0 {
            return;
        }
        let new = spent.as_secs_f64() / units as f64;
        let mut rates = self.rates.lock().unwrap_or_else(PoisonError::into_inner);
        let rate = &mut rates[kind as usize];
        let weight = if rate.measurements == 0 { 1.0 } else { WEIGHT };
        rate.seconds_per_unit += (new - rate.seconds_per_unit) * weight;
        rate.measurements += 1;
    }

    /// Takes in something that has just ended and shared what it needs with others: its turn began
    /// when the one before it ended. Waiting behind others is not its own time. Returns that.
    pub fn measured_in_turn(&self, kind: Kind, units: u64, started: Instant) -> Duration {
        let now = Instant::now();
        let mut ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let last = ended[kind as usize].replace(now);
        drop(ended);
        let spent = now.saturating_duration_since(last.map_or(started, |l| l.max(started)));
        self.measured(kind, units, spent);
        spent
    }

    /// Seconds so many units take; nothing before enough was measured.
    pub fn seconds(&self, kind: Kind, units: u64) -> Option<f64> {
        let rate = self.rates.lock().unwrap_or_else(PoisonError::into_inner)[kind as usize];
        (rate.measurements >= 3).then_some(rate.seconds_per_unit * units as f64)
    }

    /// Whether to compute a chunk rather than load it: milliseconds of loading and of computing.
    pub fn prefer_computing(&self, kind: Kind, bytes: u64, rows: usize) -> Option<(u64, u64)> {
        let load = self.seconds(kind, bytes)?;
        let compute = self.seconds(Kind::Compute, rows as u64)?;
        if self.patience == 0 || load <= f64::from(self.patience) * compute {
            return None;
        }
        let mut skipped = self.skipped.lock().unwrap_or_else(PoisonError::into_inner);
        *skipped += 1;
        let trial = skipped.is_multiple_of(TRIAL);
        (!trial).then_some(((load * 1e3) as u64, (compute * 1e3) as u64))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waiting_behind_others_is_not_loading() {
        let rates = Rates::default();
        let started = Instant::now() - Duration::from_secs(64);
        // Sixty-four that were started together: the first took as long as it took, the others
        // ended right behind it.
        let spent: Vec<Duration> =
            (0..64).map(|_| rates.measured_in_turn(Kind::Flash, 1, started)).collect();
        assert!(spent[0] >= Duration::from_secs(64), "{:?}", spent[0]);
        let all: Duration = spent.iter().sum();
        let real = started.elapsed();
        assert!(all <= real, "{all:?} of {real:?} were spent");
    }

    #[test]
    fn what_is_slower_is_not_done_but_tried_now_and_then() {
        let rates = Rates::new(2);
        assert_eq!(rates.prefer_computing(Kind::Cold, 1000, 10), None, "nothing measured");
        for _ in 0..3 {
            rates.measured(Kind::Cold, 1000, Duration::from_secs(3));
            rates.measured(Kind::Compute, 10, Duration::from_secs(1));
        }
        let skips: Vec<bool> =
            (0..64).map(|_| rates.prefer_computing(Kind::Cold, 1000, 10).is_some()).collect();
        assert_eq!(skips.iter().filter(|s| !**s).count(), 2, "one trial in {TRIAL}");
        // It has become fast: found out by the trials, believed after some.
        for _ in 0..20 {
            rates.measured(Kind::Cold, 1000, Duration::from_millis(10));
        }
        assert_eq!(rates.prefer_computing(Kind::Cold, 1000, 10), None);
    }

    #[test]
    fn patience_decides_what_is_slower() {
        for (patience, computed) in [(0, false), (2, true), (4, false)] {
            let rates = Rates::new(patience);
            for _ in 0..3 {
                rates.measured(Kind::Flash, 1000, Duration::from_secs(3));
                rates.measured(Kind::Compute, 10, Duration::from_secs(1));
            }
            let found = rates.prefer_computing(Kind::Flash, 1000, 10);
            assert_eq!(found.is_some(), computed, "{patience}");
        }
    }
}
