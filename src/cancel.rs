//! Which request a cancellation means.
//!
//! A `notifications/cancelled` names a JSON-RPC id, travels on another connection than its request, and may come
//! before it or after its answer. Ids are small numbers that every client counts from the start, so the rules are
//! careful: ids are compared by value ([`id_key`]), an ambiguous cancellation hits nobody, one that comes too
//! early waits for its request a short while (a tombstone), and one that comes too late waits for nobody.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, Instant};

use crate::json;
use crate::jsonrpc::MAX_ID_BYTES;

/// How long a cancellation waits for its request, and how long an answered id is remembered.
pub const TOMBSTONE_LIFE: Duration = Duration::from_secs(5);
/// The most cancellations that wait at once; the oldest gives way.
pub const MAX_TOMBSTONES: usize = 1024;
/// The most answered ids that are remembered; the oldest gives way.
pub const MAX_ANSWERED: usize = 256;

/// One key for all texts of the same id: strings by their characters, numbers by their value.
///
/// `1`, `1.0` and `1e0` are one id; `1` and `"1"` are two.
pub fn id_key(id: &str) -> String {
    match json::as_string(id) {
        Some(text) => format!("s{text}"),
        None => format!("n{}", json::canonical_number(id).unwrap_or_else(|| id.to_owned())),
    }
}

/// The value of an id that is a number and whole, as far as it is no larger than most are.
fn whole_number(id: &str) -> Option<u64> {
    if !id.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    // Most often it is written as such.
    id.parse().ok().or_else(|| {
        let canonical = json::canonical_number(id)?;
        let (digits, exponent) = canonical.split_once('e').unwrap_or((&canonical, "0"));
        digits.parse::<u64>().ok()?.checked_mul(10_u64.checked_pow(exponent.parse().ok()?)?)
    })
}

/// Whether two ids, as texts, are the same id.
pub fn same_id(a: &str, b: &str) -> bool {
    a == b || id_key(a) == id_key(b)
}

/// The cancellations that came before their request, and the answers that came before their cancellation.
#[derive(Debug)]
pub struct Tombstones {
    waiting: VecDeque<(String, Instant)>,
    answered: VecDeque<(u64, Instant)>,
    max_waiting: usize,
    max_answered: usize,
    hasher: RandomState,
}

impl Default for Tombstones {
    fn default() -> Self {
        Tombstones::new(MAX_TOMBSTONES, MAX_ANSWERED)
    }
}

impl Tombstones {
    /// Room for so many cancellations that wait, and so many answered ids.
    pub fn new(max_waiting: usize, max_answered: usize) -> Self {
        Tombstones {
            waiting: VecDeque::new(),
            answered: VecDeque::new(),
            max_waiting,
            max_answered,
            hasher: RandomState::new(),
        }
    }

    /// A cancellation matched no request in flight: let it wait, unless that id was just answered. Says whether it
    /// waits. An id that is longer than those of requests waits for nothing, and would cost memory.
    pub fn bury(&mut self, id: &str, now: Instant) -> bool {
        if id.len() > MAX_ID_BYTES {
            return false;
        }
        let is_live = |since: &Instant| now.duration_since(*since) < TOMBSTONE_LIFE;
        let hash = self.hash(id);
        if self.answered.iter().any(|(answered, since)| *answered == hash && is_live(since)) {
            return false;
        }
        self.waiting.retain(|(_, since)| is_live(since));
        let key = id_key(id);
        // A repeated cancellation does not live longer than the first.
        if self.waiting.iter().all(|(waiting, _)| *waiting != key) {
            if self.waiting.len() == self.max_waiting {
                self.waiting.pop_front();
            }
            self.waiting.push_back((key, now));
        }
        true
    }

    /// A request starts: was it cancelled already? At most one request is hit by a cancellation.
    pub fn take(&mut self, id: &str, now: Instant) -> bool {
        if self.waiting.is_empty() {
            return false;
        }
        self.waiting.retain(|(_, since)| now.duration_since(*since) < TOMBSTONE_LIFE);
        let key = id_key(id);
        let found = self.waiting.iter().position(|(waiting, _)| *waiting == key);
        found.map(|at| self.waiting.remove(at)).is_some()
    }

    /// Forgets what is over, with its memory.
    pub fn sweep(&mut self, now: Instant) {
        let is_live = |since: &Instant| now.duration_since(*since) < TOMBSTONE_LIFE;
        self.waiting.retain(|(_, since)| is_live(since));
        self.waiting.shrink_to_fit();
        self.answered.retain(|(_, since)| is_live(since));
        self.answered.shrink_to_fit();
    }

    /// A request was answered: a cancellation that is still on its way means nothing.
    pub fn answered(&mut self, id: &str, now: Instant) {
        while let Some((_, since)) = self.answered.front() {
            if self.answered.len() < self.max_answered && now.duration_since(*since) < TOMBSTONE_LIFE {
                break;
            }
            self.answered.pop_front();
        }
        self.answered.push_back((self.hash(id), now));
    }

    /// One hash for all texts of the same id.
    fn hash(&self, id: &str) -> u64 {
        match whole_number(id) {
            Some(number) => self.hasher.hash_one(number),
            None => self.hasher.hash_one(id_key(id)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_compared_by_value_and_type() {
        assert!(same_id("1", "1.0") && same_id("100", "1e2") && same_id(r#""\u0041""#, r#""A""#));
        assert!(!same_id("1", "\"1\"") && !same_id("\"\"", "0") && !same_id("9007199254740993", "9007199254740992"));
    }

    #[test]
    fn all_texts_of_an_answered_id_are_known() {
        let max = u64::MAX.to_string();
        for (answered, cancelled) in [
            ("100", "1e2"),
            ("1e2", "100.0"),
            ("7", "7.00"),
            ("0", "0e9"),
            ("1e30", "10e29"),
            (&max, &max),
            ("-1", "-1.0"),
        ] {
            let mut stones = Tombstones::default();
            stones.answered(answered, Instant::now());
            assert!(!stones.bury(cancelled, Instant::now()), "{answered} {cancelled}");
            assert!(stones.bury(&format!("\"{cancelled}\""), Instant::now()), "{answered} {cancelled}");
            assert!(stones.bury("12", Instant::now()));
        }
    }

    #[test]
    fn an_early_cancellation_hits_one_request_within_its_life() {
        let start = Instant::now();
        let mut stones = Tombstones::default();
        stones.bury("1", start);
        stones.bury("1.0", start + Duration::from_secs(3));
        assert!(!stones.take("\"1\"", start));
        assert!(stones.take("1e0", start + Duration::from_millis(4999)));
        assert!(!stones.take("1", start + Duration::from_millis(4999)));
        stones.bury("2", start);
        stones.bury("2", start + Duration::from_secs(3));
        assert!(!stones.take("2", start + TOMBSTONE_LIFE), "a repeat does not extend its life");
    }

    #[test]
    fn a_late_cancellation_does_not_poison_the_reuse_of_its_id() {
        let start = Instant::now();
        let mut stones = Tombstones::default();
        stones.answered("0", start);
        stones.bury("0", start + Duration::from_secs(1));
        assert!(!stones.take("0", start + Duration::from_secs(1)));
        stones.bury("0", start + TOMBSTONE_LIFE);
        assert!(stones.take("0", start + TOMBSTONE_LIFE));
    }

    #[test]
    fn both_memories_are_bounded_and_the_oldest_gives_way() {
        let start = Instant::now();
        let mut stones = Tombstones::default();
        for id in 0..=MAX_TOMBSTONES {
            stones.bury(&id.to_string(), start);
        }
        assert!(!stones.take("0", start));
        assert!(stones.take("1", start) && stones.take(&MAX_TOMBSTONES.to_string(), start));
        for id in 0..=2 * MAX_ANSWERED {
            stones.answered(&id.to_string(), start);
        }
        assert_eq!(stones.answered.len(), MAX_ANSWERED);
        let kept = |stones: &Tombstones| (stones.waiting.capacity(), stones.answered.capacity());
        stones.sweep(start + TOMBSTONE_LIFE / 2);
        assert!(kept(&stones) >= (MAX_TOMBSTONES - 2, MAX_ANSWERED));
        stones.sweep(start + TOMBSTONE_LIFE);
        assert_eq!(kept(&stones), (0, 0));
    }

    #[test]
    fn an_id_that_is_too_long_for_a_request_is_not_kept() {
        let start = Instant::now();
        let mut stones = Tombstones::default();
        assert!(stones.bury(&format!("\"{}\"", "x".repeat(MAX_ID_BYTES - 2)), start));
        assert!(!stones.bury(&format!("\"{}\"", "x".repeat(MAX_ID_BYTES - 1)), start));
        assert_eq!(stones.waiting.len(), 1);
    }
}
