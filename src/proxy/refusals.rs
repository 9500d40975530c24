//! Refusals of a kind within a second are one line: whoever is refused decides how often, and must not fill the log.
//!
//! The first one is told at once; those that follow are counted and told when the second is over, for as long as they
//! come. What is kept is bounded: beyond, all addresses together are one.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::proxy::metrics::{Refused, Side};
use crate::proxy::rates::network_of;

/// For how long refusals of a kind are counted before they are told.
pub const WINDOW: Duration = Duration::from_secs(1);
/// How many kinds are told apart at once.
const MAX_KINDS: usize = 256;

/// Somebody was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refusal {
    /// An app or an MCP client.
    pub side: Side,
    /// Whose.
    pub address: IpAddr,
    /// What it was told: the HTTP status, or a bridge's close code.
    pub status: u16,
    /// Why.
    pub why: Refused,
}

/// What a line tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Told {
    /// What happened.
    pub refusal: Refusal,
    /// Whether it happened to one address (or /64 of IPv6), or to several.
    pub is_one: bool,
    /// How often.
    pub count: u64,
}

/// The refusals of the last second.
#[derive(Debug, Default)]
pub struct Refusals {
    kinds: Mutex<HashMap<Kind, Window>>,
}

/// What is counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Kind {
    network: Option<IpAddr>,
    side: Side,
    status: u16,
    why: Refused,
}

#[derive(Debug)]
struct Window {
    since: Instant,
    first: Refusal,
    untold: u64,
}

impl Refusals {
    fn kinds(&self) -> MutexGuard<'_, HashMap<Kind, Window>> {
        self.kinds.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts a refusal; the line to be written at once, if there is one.
    pub fn count(&self, refusal: Refusal, now: Instant) -> Option<Told> {
        let mut kinds = self.kinds();
        let Refusal { side, address, status, why } = refusal;
        let mut kind = Kind { network: Some(network_of(address)), side, status, why };
        if kinds.len() >= MAX_KINDS && !kinds.contains_key(&kind) {
            kind.network = None;
        }
        let is_one = kind.network.is_some();
        match kinds.entry(kind) {
            Entry::Vacant(free) => {
                free.insert(Window { since: now, first: refusal, untold: 0 });
                Some(Told { refusal, is_one, count: 1 })
            }
            Entry::Occupied(window) => {
                window.into_mut().untold += 1;
                None
            }
        }
    }

    /// The lines whose second is over at `now`.
    pub fn due(&self, now: Instant) -> Vec<Told> {
        let mut due = Vec::new();
        self.kinds().retain(|kind, window| {
            if now.saturating_duration_since(window.since) < WINDOW {
                return true;
            }
            let count = std::mem::take(&mut window.untold);
            if count > 0 {
                due.push(Told { refusal: window.first, is_one: kind.network.is_some(), count });
                window.since = now;
            }
            count > 0
        });
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(address: &str) -> Refusal {
        Refusal { side: Side::App, address: address.parse().unwrap(), status: 401, why: Refused::Token }
    }

    #[test]
    fn the_first_is_told_at_once_and_the_others_when_their_second_is_over() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        let one = refusal("10.0.0.1");
        let told = |count| Told { refusal: one, is_one: true, count };
        assert_eq!(refusals.count(one, start), Some(told(1)));
        assert_eq!((0..6000).filter_map(|_| refusals.count(one, start)).count(), 0);
        let other = Refusal { status: 429, why: Refused::Limit, ..one };
        assert!(refusals.count(other, start).is_some(), "it is of another kind");
        assert!(refusals.due(start + WINDOW / 2).is_empty());
        assert_eq!(refusals.due(start + WINDOW), [told(6000)]);
        // While they go on there is one line a second, and then none.
        assert_eq!(refusals.count(one, start + WINDOW), None);
        assert_eq!(refusals.due(start + 2 * WINDOW), [told(1)]);
        assert!(refusals.due(start + 3 * WINDOW).is_empty());
        assert!(refusals.kinds().is_empty());
        assert_eq!(refusals.count(one, start + 3 * WINDOW), Some(told(1)));
    }

    #[test]
    fn attacks_from_everywhere_cost_neither_memory_nor_lines() {
        let (refusals, start) = (Refusals::default(), Instant::now());
        // A stranger has a whole network of these.
        let network = (0..1000).filter_map(|n| refusals.count(refusal(&format!("2001:db8::{n:x}")), start));
        assert_eq!(network.count(), 1);
        let lines = (0..20_000_u32).filter_map(|n| refusals.count(refusal(&IpAddr::V4(n.into()).to_string()), start));
        let lines = lines.count() + refusals.due(start + WINDOW).len();
        assert!(lines <= MAX_KINDS + 3 && refusals.kinds().len() <= MAX_KINDS + 1, "{lines}");
    }
}
