//! Waiting for something to become true, never for a time to pass.

use std::time::{Duration, Instant};

/// How long anything may take on a busy machine before it counts as stuck.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// How often a condition is looked at.
const EVERY: Duration = Duration::from_millis(10);

/// Asks again and again until there is an answer.
///
/// # Panics
/// If there is none before [`DEADLINE`].
pub async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} in vain until {what}");
        tokio::time::sleep(EVERY).await;
    }
}
