//! Which sessions there are. Lookups clone out of the map in the same statement; nothing is locked for longer.

use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use foldhash::fast::RandomState;

use crate::auth::TokenHash;
use crate::mcp::listen::Listeners;
use crate::protocol::{Close, SessionId};
use crate::proxy::audit::Who;
use crate::proxy::bridge::{Bridge, BridgeLimits, CallError};
use crate::proxy::metrics::{Limit, SessionEnd};
use crate::proxy::records::Records;
use crate::proxy::session::{Registration, Session, ToolSet};
use crate::proxy::state_file::Changes;
use crate::proxy::tenants::{AppCaller, Client, Count, Tenant};

/// How often expired sessions are swept out. An expired session is also gone when it is asked for.
pub const SWEEP_INTERVAL: Duration = Duration::from_secs(15);
/// How often a registration that finds no place sweeps at the most: it looks at everybody's sessions.
const HURRIED_SWEEP_INTERVAL: Duration = Duration::from_secs(1);

/// The sessions of this process.
#[derive(Debug)]
pub struct Registry {
    /// Their ids are random, and none is a stranger's choice.
    entries: DashMap<SessionId, Entry, RandomState>,
    count: Count,
    ttl: Duration,
    max_listeners: usize,
    limits: BridgeLimits,
    records: Arc<Records>,
    /// Who writes them down, if anybody does.
    changes: Option<Arc<Changes>>,
    last_sweep: Mutex<Option<Instant>>,
}

/// A session: what was registered, and its live half. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Entry {
    /// What the app registered; replaced when its tools change.
    pub session: Arc<Session>,
    /// Its calls and its socket.
    pub bridge: Arc<Bridge>,
    /// The MCP clients that hear of changes of its tools.
    pub listeners: Arc<Listeners>,
    /// Whose it is.
    pub owner: Arc<Owner>,
}

impl Entry {
    /// Whose it is, for the audit log.
    pub fn who(&self) -> Who {
        Who { tenant: Arc::clone(&self.owner.tenant), session: self.session.id }
    }
}

/// Whose a session is, and what opens it beside its tenant's tokens.
#[derive(Debug)]
pub struct Owner {
    /// The tenant.
    pub tenant: Arc<Tenant>,
    /// What its app must send beside its token, if it asked for that.
    pub secret: Option<TokenHash>,
    /// The one token of MCP clients that opens it, if its app asked for one. The tenant's do not then.
    pub mcp_token: Option<TokenHash>,
}

impl Owner {
    /// Whether an app may use the session.
    pub fn admits_app(&self, caller: &AppCaller) -> bool {
        let has_secret = match (&self.secret, &caller.secret) {
            (None, _) => true,
            (Some(secret), Some(given)) => secret.matches(given),
            (Some(_), None) => false,
        };
        self.is_of(caller) && has_secret
    }

    /// Whether an app is the tenant's, whatever the session asks for beside.
    pub fn is_of(&self, caller: &AppCaller) -> bool {
        Arc::ptr_eq(&self.tenant, &caller.tenant)
    }

    /// Whether an MCP client may use the session.
    pub fn admits_client(&self, client: &Client) -> bool {
        match &self.mcp_token {
            Some(token) => client.hash.as_ref().is_some_and(|given| token.matches(given)),
            None => client.tenant.as_ref().is_some_and(|tenant| Arc::ptr_eq(tenant, &self.tenant)),
        }
    }
}

/// There are as many sessions as allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Full {
    /// Of the tenant.
    Tenant(usize),
    /// In all.
    Everybody(usize),
}

impl Full {
    /// The bound that was met.
    fn limit(self) -> Limit {
        match self {
            Full::Tenant(_) => Limit::SessionsPerTenant,
            Full::Everybody(_) => Limit::Sessions,
        }
    }
}

/// When apps come back to a proxy that restarts: spread evenly over a second at the least, so that the new process is
/// there before most of them, and half a minute at the most, so that nobody is away for long.
#[derive(Debug, Clone, Copy)]
struct Returns {
    apps: u32,
    time: Duration,
}

impl Returns {
    const SHORTEST: Duration = Duration::from_secs(1);
    const LONGEST: Duration = Duration::from_secs(30);

    fn new(apps: usize, per_second: u32) -> Self {
        let apps = u32::try_from(apps).unwrap_or(u32::MAX).max(1);
        let time = Duration::from_secs(1) * apps / per_second.max(1);
        Returns { apps, time: time.clamp(Self::SHORTEST, Self::LONGEST) }
    }

    /// The middle of the share that app number `number` has of the time.
    fn of(self, number: usize) -> Duration {
        let number = u32::try_from(number).unwrap_or(u32::MAX) % self.apps;
        self.time.mul_f64((f64::from(number) + 0.5) / f64::from(self.apps))
    }
}

impl Registry {
    /// No sessions yet; each may have `max_listeners`.
    pub fn new(
        ttl: Duration,
        max_sessions: usize,
        max_listeners: usize,
        limits: BridgeLimits,
        records: Arc<Records>,
        changes: Option<Arc<Changes>>,
    ) -> Self {
        Registry {
            entries: DashMap::default(),
            count: Count::new(max_sessions),
            ttl,
            max_listeners,
            limits,
            records,
            changes,
            last_sweep: Mutex::default(),
        }
    }

    /// How many sessions there are.
    pub fn len(&self) -> usize {
        self.count.now()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Adds a session.
    ///
    /// # Errors
    /// [`Full`] if there are too many.
    pub fn create(&self, registration: Registration, owner: Owner, now: Instant) -> Result<Entry, Full> {
        if self.take_place(&owner.tenant).is_err() {
            // Expired sessions that the sweeper has not met yet must not keep a living app out.
            if self.is_sweep_due(now) {
                self.sweep(now);
            }
            self.take_place(&owner.tenant).inspect_err(|full| self.records.limit(full.limit()))?;
        }
        let session = Session::new(SessionId::random(), registration);
        let bridge = self.bridge(&session, now);
        let entry = self.insert(session, bridge, owner);
        self.tell_change(entry.session.id);
        Ok(entry)
    }

    /// Adds a session of an earlier process.
    ///
    /// # Errors
    /// [`Full`] if there are too many.
    pub fn restore(&self, id: SessionId, registration: Registration, owner: Owner, now: Instant) -> Result<(), Full> {
        self.take_place(&owner.tenant)?;
        let session = Session::new(id, registration);
        let bridge = self.bridge(&session, now).restored();
        self.insert(session, bridge, owner);
        Ok(())
    }

    fn bridge(&self, session: &Session, now: Instant) -> Bridge {
        let registration = &session.registration;
        let records = Arc::clone(&self.records);
        Bridge::new(session.id, registration.spelling, registration.features, self.limits, records, now)
    }

    fn insert(&self, session: Session, bridge: Bridge, owner: Owner) -> Entry {
        let entry = Entry {
            session: Arc::new(session),
            bridge: Arc::new(bridge),
            listeners: Arc::new(Listeners::new(self.max_listeners)),
            owner: Arc::new(owner),
        };
        self.entries.insert(entry.session.id, entry.clone());
        entry
    }

    fn tell_change(&self, id: SessionId) {
        if let Some(changes) = &self.changes {
            changes.tell(id);
        }
    }

    fn is_sweep_due(&self, now: Instant) -> bool {
        let mut last = self.last_sweep.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = last.is_none_or(|last| now.saturating_duration_since(last) >= HURRIED_SWEEP_INTERVAL);
        if is_due {
            *last = Some(now);
        }
        is_due
    }

    fn take_place(&self, tenant: &Tenant) -> Result<(), Full> {
        tenant.sessions().take().map_err(|full| Full::Tenant(full.limit))?;
        self.count.take().map_err(|full| {
            tenant.sessions().give_back();
            Full::Everybody(full.limit)
        })
    }

    /// The session of this id, if this app may use it.
    pub fn of_app(&self, id: SessionId, caller: &AppCaller, now: Instant) -> Option<Entry> {
        self.get(id, now).filter(|entry| entry.owner.admits_app(caller))
    }

    /// The session of this id, whosever it is, unless it has expired.
    pub fn get(&self, id: SessionId, now: Instant) -> Option<Entry> {
        let entry = self.entries.get(&id).map(|entry| Entry::clone(&entry))?;
        if entry.bridge.expire(self.ttl, now) {
            if self.remove(id).is_some() {
                self.records.session_ended(&entry.who(), SessionEnd::Expired);
            }
            return None;
        }
        Some(entry)
    }

    /// Replaces a session's tools and tells who listens; false if there is no such session.
    pub fn update_tools(&self, id: SessionId, tools: ToolSet, now: Instant) -> bool {
        if self.get(id, now).is_none() {
            return false;
        }
        let Some(mut entry) = self.entries.get_mut(&id) else { return false };
        // Apps repeat their list when they reconnect; every client would fetch it again for nothing.
        let is_news = *entry.session.registration.tools.modern_list() != *tools.modern_list();
        entry.session = Arc::new(entry.session.with_tools(tools));
        entry.bridge.touch(now);
        if is_news {
            self.tell_change(id);
            entry.listeners.tell_change();
        }
        true
    }

    /// Ends a session and forgets it. True if there was one.
    pub fn delete(&self, id: SessionId) -> bool {
        self.end(id, Close::Deleted).is_some()
    }

    /// Ends the sessions of tenants that are gone; how many there were.
    pub fn revoke(&self, is_there: impl Fn(&Arc<Tenant>) -> bool) -> usize {
        let gone = self.entries.iter().filter(|entry| !is_there(&entry.owner.tenant)).map(|entry| *entry.key());
        let gone: Vec<SessionId> = gone.collect();
        let revoked = gone.into_iter().filter_map(|id| self.end(id, Close::Unauthorized));
        revoked.inspect(|entry| self.records.session_ended(&entry.who(), SessionEnd::Revoked)).count()
    }

    /// Closes the bridges whose token opens their session no more; how many there were.
    pub fn cut_bridges(&self, opens: impl Fn(Option<&TokenHash>, &Arc<Tenant>) -> bool) -> usize {
        let cut = |entry: &Entry| entry.bridge.cut_unless(|token| opens(token, &entry.owner.tenant));
        self.entries.iter().filter(|entry| cut(entry)).count()
    }

    fn end(&self, id: SessionId, close: Close) -> Option<Entry> {
        let entry = self.remove(id)?;
        entry.bridge.end(CallError::Deleted, close);
        Some(entry)
    }

    /// When the session would expire if nothing happened; `None` while it is kept alive.
    pub fn expires_at(&self, entry: &Entry) -> Option<Instant> {
        entry.bridge.expires_at(self.ttl)
    }

    /// Forgets the sessions that have expired, and ends calls that are overdue; how many sessions those were.
    pub fn sweep(&self, now: Instant) -> usize {
        let mut expired = Vec::new();
        for entry in &self.entries {
            entry.bridge.sweep(now);
            if entry.bridge.expire(self.ttl, now) {
                expired.push(*entry.key());
            }
        }
        expired
            .into_iter()
            .filter_map(|id| self.remove(id))
            .inspect(|entry| self.records.session_ended(&entry.who(), SessionEnd::Expired))
            .count()
    }

    /// Ends the streams of those who listen, because the process stops: nobody waits for their end.
    pub fn dismiss_listeners(&self) {
        for entry in &self.entries {
            entry.listeners.end();
        }
    }

    /// Ends what waits for apps to come back, because no new socket is accepted any more.
    pub fn end_waiting(&self, now: Instant) {
        for entry in &self.entries {
            entry.bridge.end_waiting(now);
        }
    }

    /// Ends every session because the process stops: calls are answered, bridges closed with 1012 and told to come back
    /// one after another, `reconnects_per_second` of them.
    pub fn shut_down(&self, reconnects_per_second: u32) {
        let returns = Returns::new(self.len(), reconnects_per_second);
        for (number, entry) in self.entries.iter().enumerate() {
            entry.bridge.end(CallError::ShuttingDown, Close::Restart { retry: returns.of(number) });
            // With a state file, it lives on.
            if self.changes.is_none() {
                self.records.session_ended(&entry.who(), SessionEnd::Shutdown);
            }
        }
    }

    /// Shows one session after another, in no order, for as long as `show` wants to see more.
    pub fn each(&self, mut show: impl FnMut(&Entry) -> ControlFlow<()>) {
        for entry in &self.entries {
            if show(&entry).is_break() {
                return;
            }
        }
    }

    /// How many calls are in flight in all.
    pub fn calls_in_flight(&self) -> usize {
        self.entries.iter().map(|entry| entry.bridge.calls_in_flight()).sum()
    }

    fn remove(&self, id: SessionId) -> Option<Entry> {
        let (_, entry) = self.entries.remove(&id)?;
        self.tell_change(id);
        self.count.give_back();
        entry.owner.tenant.sessions().give_back();
        entry.listeners.end();
        Some(entry)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_take_from_a_second_to_half_a_minute() {
        let ends = |apps: usize, per_second| {
            let returns = Returns::new(apps, per_second);
            (returns.of(0).as_millis(), returns.of(apps.saturating_sub(1)).as_millis())
        };
        assert_eq!(ends(0, 500), (500, 500));
        assert_eq!(ends(1, 500), (500, 500));
        assert_eq!(ends(10, 500), (50, 950));
        assert_eq!(ends(10_000, 500), (1, 19_999));
        assert_eq!(ends(1_000_000, 500), (0, 29_999));
        assert_eq!(ends(10, 0), (500, 9_500));
    }
}
