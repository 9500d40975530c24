//! The counts of the last minutes, so that a page that is opened now shows what has led here.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::status;
use crate::proxy::ProxyState;

/// How often the counts are noted.
const INTERVAL: Duration = Duration::from_secs(2);
/// How many notes are kept: five minutes of them, and the one before.
const KEPT: usize = 151;

/// Notes of the counts, as JSON, the oldest first.
#[derive(Debug, Default)]
pub(super) struct History(Mutex<VecDeque<Box<str>>>);

impl History {
    /// Notes the counts again and again, until it is dropped.
    pub(super) async fn keep(&self, state: &ProxyState) {
        let mut ticks = tokio::time::interval(INTERVAL);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.note(status::counts(state).to_string().into());
        }
    }

    fn note(&self, counts: Box<str>) {
        let mut notes = self.notes();
        notes.push_back(counts);
        if notes.len() > KEPT {
            notes.pop_front();
        }
    }

    /// All of them, as a JSON array.
    pub(super) fn to_json(&self) -> String {
        let notes: Vec<Box<str>> = self.notes().iter().cloned().collect();
        format!("[{}]", notes.join(","))
    }

    fn notes(&self) -> MutexGuard<'_, VecDeque<Box<str>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_notes_are_kept_and_no_more() {
        let history = History::default();
        assert_eq!(history.to_json(), "[]");
        (0..=KEPT).for_each(|n| history.note(n.to_string().into()));
        let notes: Vec<usize> = serde_json::from_str(&history.to_json()).unwrap();
        assert_eq!(notes, (1..=KEPT).collect::<Vec<_>>());
    }
}
