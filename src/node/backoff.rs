//! How long to wait before trying again: full jitter, so that many who lost the same server do not return as one.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(500);
const LONGEST: Duration = Duration::from_secs(30);
/// How long something must have worked for the next failure to count as the first.
pub const HEALTHY: Duration = Duration::from_secs(60);

/// Counts failures in a row.
#[derive(Debug, Default)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The pause after one more failure: random, from nothing to twice as long as the last time at the most.
    pub fn pause(&mut self) -> Duration {
        let longest = Self::bound(self.failures);
        self.failures += 1;
        longest.mul_f64(random())
    }

    /// The pause that the other side asks for, as far as it is no longer than our own would ever be. It is no failure.
    pub fn asked(asked: Duration) -> Duration {
        asked.min(LONGEST)
    }

    /// Something worked for as long as `lasted`.
    pub fn worked(&mut self, lasted: Duration) {
        if lasted >= HEALTHY {
            self.failures = 0;
        }
    }

    fn bound(failures: u32) -> Duration {
        FIRST.saturating_mul(1 << failures.min(16)).min(LONGEST)
    }
}

/// From 0 to 1, from the operating system's random numbers.
fn random() -> f64 {
    let bits = uuid::Uuid::new_v4().as_u128() as u32;
    f64::from(bits) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_half_a_minute_and_are_short_again_after_a_healthy_minute() {
        let bounds: Vec<f32> = (0..8).map(|failures| Backoff::bound(failures).as_secs_f32()).collect();
        assert_eq!(bounds, [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]);
        let mut backoff = Backoff::default();
        for failures in 0..100 {
            assert!(backoff.pause() <= Backoff::bound(failures));
        }
        backoff.worked(Duration::from_secs(59));
        assert_eq!(backoff.failures, 100);
        backoff.worked(HEALTHY);
        assert!(backoff.pause() <= FIRST);
    }
}
