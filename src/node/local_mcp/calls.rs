//! The calls in flight of the local MCP server, and which of them a cancellation hits.
//!
//! Every client counts its ids from the start, and the transport does not tell clients apart: several calls may have
//! the same id, and then a cancellation of it hits none of them. One that comes before its call waits for it, and
//! one that comes too late is forgotten ([`crate::cancel`]). A waiting cancellation may hit another client's first
//! call with that id; only an identity of clients could prevent it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use crate::cancel::{MAX_TOMBSTONES, Tombstones, id_key};

/// The calls in flight.
#[derive(Debug)]
pub struct Calls {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    active: HashMap<String, Vec<Arc<Invocation>>>,
    tombstones: Tombstones,
}

/// What a cancellation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cancelled {
    /// It ended a call.
    Call,
    /// It waits for its call.
    Waits,
    /// It came too late.
    TooLate,
    /// Several calls have that id.
    Ambiguous,
}

/// Who ended a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedBy {
    /// The client, by a notification.
    Caller,
    /// Its deadline, the server's shutdown, or a broken connection.
    Transport,
}

/// One call in flight.
#[derive(Debug)]
pub struct Invocation {
    token: CancellationToken,
    state: Mutex<InvocationState>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InvocationState {
    Running,
    CancelledByCaller,
    Completed,
}

impl Invocation {
    fn new(transport: &CancellationToken) -> Self {
        Invocation { token: transport.child_token(), state: Mutex::new(InvocationState::Running) }
    }

    /// Fires when the call is to end, whoever wants it.
    pub fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// Settles that the call has a result, or says who was quicker: then the result must be thrown away.
    ///
    /// # Errors
    /// [`EndedBy`], if the call was ended before.
    pub fn complete(&self) -> Result<(), EndedBy> {
        let mut state = lock(&self.state);
        match *state {
            InvocationState::CancelledByCaller => Err(EndedBy::Caller),
            InvocationState::Running if self.token.is_cancelled() => Err(EndedBy::Transport),
            InvocationState::Running | InvocationState::Completed => {
                *state = InvocationState::Completed;
                Ok(())
            }
        }
    }

    /// Cancels the call for its caller; `false` if it has ended already, in whatever way.
    fn cancel(&self) -> bool {
        let mut state = lock(&self.state);
        let is_running = *state == InvocationState::Running && !self.token.is_cancelled();
        if is_running {
            *state = InvocationState::CancelledByCaller;
            self.token.cancel();
        }
        is_running
    }
}

/// A call's place among those in flight; dropping it gives it up.
#[derive(Debug)]
pub struct Registered<'a> {
    calls: &'a Calls,
    id: String,
    /// The call.
    pub invocation: Arc<Invocation>,
}

impl Default for Calls {
    fn default() -> Self {
        Calls::new(MAX_TOMBSTONES)
    }
}

impl Calls {
    /// No calls, and room to remember so many cancellations and as many answered ids.
    pub fn new(capacity: usize) -> Self {
        let tombstones = Tombstones::new(capacity, capacity);
        Calls { state: Mutex::new(State { active: HashMap::new(), tombstones }) }
    }

    /// A call with this JSON-RPC id begins. It may be cancelled already, even if `transport` has fired, too.
    pub fn register(&self, id: &str, transport: &CancellationToken, now: Instant) -> Registered<'_> {
        let id = comparable(id);
        let invocation = Arc::new(Invocation::new(transport));
        let mut state = lock(&self.state);
        if state.tombstones.take(&id, now) {
            *lock(&invocation.state) = InvocationState::CancelledByCaller;
            invocation.token.cancel();
        }
        state.active.entry(id_key(&id)).or_default().push(Arc::clone(&invocation));
        Registered { calls: self, id, invocation }
    }

    /// A client cancels the call with this JSON-RPC id.
    pub fn cancel(&self, id: &str, now: Instant) -> Cancelled {
        let id = comparable(id);
        let State { active, tombstones } = &mut *lock(&self.state);
        match active.get(&id_key(&id)).map_or(&[][..], Vec::as_slice) {
            [call] if call.cancel() => Cancelled::Call,
            [] if tombstones.bury(&id, now) => Cancelled::Waits,
            [] | [_] => Cancelled::TooLate,
            _ => Cancelled::Ambiguous,
        }
    }

    fn remove(&self, id: &str, invocation: &Arc<Invocation>, now: Instant) {
        let mut state = lock(&self.state);
        let key = id_key(id);
        let Some(calls) = state.active.get_mut(&key) else { return };
        calls.retain(|call| !Arc::ptr_eq(call, invocation));
        if calls.is_empty() {
            state.active.remove(&key);
            state.tombstones.answered(id, now);
        }
    }
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        // Whatever still runs has nobody left to answer to.
        self.invocation.token.cancel();
        self.calls.remove(&self.id, &self.invocation, Instant::now());
    }
}

/// The id itself, or, where it is a string that no Rust string can hold, a string that stands for it.
fn comparable(id: &str) -> String {
    if id.starts_with('"') && serde_json::from_str::<String>(id).is_err() {
        return serde_json::Value::from(id).to_string();
    }
    id.to_owned()
}

/// Nothing that is done under these locks can leave them half done.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cancel::TOMBSTONE_LIFE;
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn only_the_call_with_that_id_is_cancelled() {
        let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
        let register = |id| calls.register(id, &transport, now);
        let (one, text, request, hundred) =
            (register("42"), register("\"42\""), register("\"request\""), register("1.0e2"));
        assert_eq!(calls.cancel("\"42\"", now), Cancelled::Call);
        assert_eq!(calls.cancel("\"42\"", now), Cancelled::TooLate);
        assert!(text.invocation.token().is_cancelled() && !one.invocation.token().is_cancelled());
        assert_eq!(text.invocation.complete(), Err(EndedBy::Caller));
        assert_eq!(calls.cancel("\"\\u0072equest\"", now), Cancelled::Call);
        assert_eq!(calls.cancel("100", now), Cancelled::Call);
        assert!(request.invocation.token().is_cancelled() && hundred.invocation.token().is_cancelled());
        assert_eq!(one.invocation.complete(), Ok(()));
        assert_eq!(calls.cancel("42", now), Cancelled::TooLate);
        assert!(!one.invocation.token().is_cancelled(), "completion came first");
    }

    #[test]
    fn the_transport_ends_a_call_without_its_caller() {
        let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
        let call = calls.register("1", &transport, now);
        transport.cancel();
        assert_eq!(calls.cancel("1", now), Cancelled::TooLate);
        assert_eq!(call.invocation.complete(), Err(EndedBy::Transport));
        drop(call);
        calls.cancel("2", now);
        let call = calls.register("2", &transport, now);
        assert_eq!(call.invocation.complete(), Err(EndedBy::Caller), "an early cancellation is worth more");
    }

    #[test]
    fn an_id_that_two_calls_have_cancels_none_until_one_has_ended() {
        let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
        let (first, second) = (calls.register("1", &transport, now), calls.register("1.0", &transport, now));
        assert_eq!(calls.cancel("1", now), Cancelled::Ambiguous);
        assert!(!first.invocation.token().is_cancelled() && !second.invocation.token().is_cancelled());
        drop(first);
        assert_eq!(calls.cancel("1", now), Cancelled::Call);
        assert!(second.invocation.token().is_cancelled());
    }

    #[test]
    fn an_early_cancellation_hits_the_first_call_within_five_seconds() {
        let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
        let is_hit = |id, at| calls.register(id, &transport, at).invocation.token().is_cancelled();
        assert_eq!(calls.cancel("1", now), Cancelled::Waits);
        assert_eq!(calls.cancel("1", now + 4 * SECOND), Cancelled::Waits);
        assert!(!is_hit("1", now + TOMBSTONE_LIFE), "a repeat does not extend its life");
        assert_eq!(calls.cancel("2", now), Cancelled::Waits);
        assert!(is_hit("2", now + SECOND) && !is_hit("2", now + SECOND));
    }

    #[test]
    fn a_late_cancellation_does_not_poison_the_reuse_of_its_id() {
        let (calls, transport) = (Calls::default(), CancellationToken::new());
        drop(calls.register("1", &transport, Instant::now()));
        assert_eq!(calls.cancel("1", Instant::now()), Cancelled::TooLate);
        assert!(!calls.register("1", &transport, Instant::now()).invocation.token().is_cancelled());
    }

    #[test]
    fn both_memories_are_bounded_and_the_oldest_gives_way() {
        let (calls, transport, now) = (Calls::new(2), CancellationToken::new(), Instant::now());
        for id in ["1", "2", "3"] {
            calls.cancel(id, now);
        }
        let hit = ["1", "2", "3"].map(|id| calls.register(id, &transport, now).invocation.token().is_cancelled());
        assert_eq!(hit, [false, true, true]);
        assert_eq!(
            ["1", "2", "3"].map(|id| calls.cancel(id, now)),
            [Cancelled::Waits, Cancelled::TooLate, Cancelled::TooLate]
        );
    }

    #[test]
    fn ids_of_any_kind_can_be_kept() {
        let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
        for id in ["true", "{}", "[1]", "\"\\ud800\"", "\"\"", "1e400", "1e99999999999999999999", "-0"] {
            let call = calls.register(id, &transport, now);
            assert_eq!(calls.cancel(id, now), Cancelled::Call, "{id}");
            drop(call);
        }
        let _zero = calls.register("0e9", &transport, now);
        assert_eq!(calls.cancel("-0.0", now), Cancelled::Call);
    }
}
