//! How many requests a second: of an address, of a tenant, and of those who have no token. And how many changes of its
//! tools a minute a session may have.
//!
//! A bucket holds a second's worth, or a minute's. Those that are full again are forgotten, so that what is kept depends on who is
//! busy and not on who has ever been here.

use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::num::NonZeroU32;
use std::sync::Arc;

use governor::clock::DefaultClock;
use governor::nanos::Nanos;
use governor::state::StateStore;
use governor::state::keyed::{DashMapStateStore, ShrinkableKeyedStateStore};
use governor::{Quota, RateLimiter};
use http::StatusCode;

use crate::protocol::SessionId;
use crate::proxy::config::Config;
use crate::proxy::gate::Refusal;
use crate::proxy::metrics::Limit;
use crate::proxy::records::Records;
use crate::proxy::tenants::Tenant;

/// The most buckets of a kind. Beyond that, whoever has none yet shares one: an attack from everywhere must not cost
/// memory.
const MAX_BUCKETS: usize = 100_000;

/// All buckets.
#[derive(Debug)]
pub struct Rates {
    addresses: Option<Buckets<IpAddr>>,
    tenants: Option<Buckets<Box<str>>>,
    denials: Option<Buckets<IpAddr>>,
    tool_updates: Option<Buckets<Option<SessionId>>>,
    records: Arc<Records>,
}

#[derive(Debug)]
struct Buckets<K: Hash + Eq + Clone> {
    buckets: RateLimiter<K, Store<K>, DefaultClock>,
    /// So many a second, or a minute, in words.
    bound: String,
    /// How soon there is room for one.
    retry_seconds: u64,
}

/// The buckets themselves.
#[derive(Debug)]
struct Store<K: Hash + Eq> {
    buckets: DashMapStateStore<K>,
    shared: K,
    most: usize,
}

impl<K: Hash + Eq + Clone> StateStore for Store<K> {
    type Key = K;

    fn measure_and_replace<T, F, E>(&self, key: &K, f: F) -> Result<T, E>
    where
        F: Fn(Option<Nanos>) -> Result<(T, Nanos), E>,
    {
        let has_own = self.buckets.contains_key(key) || self.buckets.len() < self.most;
        self.buckets.measure_and_replace(if has_own { key } else { &self.shared }, f)
    }
}

impl<K: Hash + Eq + Clone> ShrinkableKeyedStateStore<K> for Store<K> {
    fn retain_recent(&self, drop_below: Nanos) {
        self.buckets.retain_recent(drop_below);
    }

    fn shrink_to_fit(&self) {
        self.buckets.shrink_to_fit();
    }

    fn len(&self) -> usize {
        self.buckets.len()
    }

    fn is_empty(&self) -> bool {
        self.buckets.is_empty()
    }
}

impl<K: Hash + Eq + Clone> Buckets<K> {
    /// Buckets of so many a second; none, if there is no bound.
    fn per_second(count: u32, shared: K) -> Option<Self> {
        let quota = Quota::per_second(NonZeroU32::new(count)?);
        Some(Self::new(quota, format!("{count} a second"), shared, MAX_BUCKETS))
    }

    /// Buckets of so many a minute; none, if there is no bound.
    fn per_minute(count: u32, shared: K) -> Option<Self> {
        let quota = Quota::per_minute(NonZeroU32::new(count)?);
        Some(Self::new(quota, format!("{count} a minute"), shared, MAX_BUCKETS))
    }

    fn new(quota: Quota, bound: String, shared: K, most: usize) -> Self {
        let retry_seconds = quota.replenish_interval().as_secs_f64().ceil() as u64;
        let store = Store { buckets: DashMapStateStore::default(), shared, most };
        Buckets { buckets: RateLimiter::new(quota, store, DefaultClock::default()), bound, retry_seconds }
    }

    fn take(&self, key: &K) -> bool {
        self.buckets.check_key(key).is_ok()
    }
}

impl Rates {
    /// The bounds of the settings.
    pub fn new(config: &Config, records: Arc<Records>) -> Self {
        const NOBODY: IpAddr = IpAddr::V6(Ipv6Addr::UNSPECIFIED);
        Rates {
            addresses: Buckets::per_second(config.max_requests_per_second_per_address, NOBODY),
            tenants: Buckets::per_second(config.max_requests_per_second_per_tenant, "".into()),
            denials: Buckets::per_second(config.max_denials_per_second_per_address, NOBODY),
            tool_updates: Buckets::per_minute(config.max_tool_updates_per_minute, None),
            records,
        }
    }

    /// A request from this address.
    ///
    /// # Errors
    /// [`Refusal`] with 429 if there are too many.
    pub fn request(&self, ip: IpAddr) -> Result<(), Refusal> {
        self.check(self.addresses.as_ref(), &network_of(ip), "requests of this address", Limit::RequestsPerAddress)
    }

    /// A request with a token of this tenant.
    ///
    /// # Errors
    /// [`Refusal`] with 429 if there are too many.
    pub fn of_tenant(&self, tenant: &Arc<Tenant>) -> Result<(), Refusal> {
        match &self.tenants {
            None => Ok(()),
            Some(buckets) => {
                let what = "requests of this tenant";
                self.check(Some(buckets), &tenant.name().into(), what, Limit::RequestsPerTenant)
            }
        }
    }

    /// A request from this address that no token opens a door for.
    ///
    /// # Errors
    /// [`Refusal`] with 429 if there are too many.
    pub fn denial(&self, ip: IpAddr) -> Result<(), Refusal> {
        let what = "requests of this address without a valid token";
        self.check(self.denials.as_ref(), &network_of(ip), what, Limit::DenialsPerAddress)
    }

    /// The app of this session wants to change its tools, which costs more than most requests.
    ///
    /// # Errors
    /// [`Refusal`] with 429 if it does so too often.
    pub fn tool_update(&self, session: SessionId) -> Result<(), Refusal> {
        let what = "changes of this session's tools";
        self.check(self.tool_updates.as_ref(), &Some(session), what, Limit::ToolUpdates)
    }

    /// Forgets the buckets that are full again.
    pub fn sweep(&self) {
        for addresses in [&self.addresses, &self.denials].into_iter().flatten() {
            addresses.buckets.retain_recent();
            addresses.buckets.shrink_to_fit();
        }
        if let Some(tenants) = &self.tenants {
            tenants.buckets.retain_recent();
        }
        if let Some(sessions) = &self.tool_updates {
            sessions.buckets.retain_recent();
            sessions.buckets.shrink_to_fit();
        }
    }

    fn check<K: Hash + Eq + Clone>(
        &self,
        buckets: Option<&Buckets<K>>,
        key: &K,
        what: &str,
        limit: Limit,
    ) -> Result<(), Refusal> {
        let Some(buckets) = buckets else { return Ok(()) };
        if buckets.take(key) {
            return Ok(());
        }
        self.records.limit(limit);
        let Buckets { bound, retry_seconds, .. } = buckets;
        let message = format!("Too many {what} ({bound}). Retry in {retry_seconds} s.");
        Err(Refusal { status: StatusCode::TOO_MANY_REQUESTS, message })
    }
}

/// What one party is given: an IPv4 address, or a /64 of IPv6.
pub fn network_of(ip: IpAddr) -> IpAddr {
    match ip.to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & (u128::MAX << 64)).into(),
        ip => ip,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_gets_a_seconds_worth_and_ipv6_counts_by_network() {
        let mut config = Config::default();
        config.max_denials_per_second_per_address = 2;
        let rates = Rates::new(&config, Arc::default());
        let denied = |ip: &str| rates.denial(ip.parse().unwrap()).is_err();
        assert_eq!([denied("10.0.0.1"), denied("10.0.0.1"), denied("10.0.0.1")], [false, false, true]);
        assert_eq!([denied("10.0.0.2"), denied("::ffff:10.0.0.1")], [false, true]);
        assert_eq!([denied("2001:db8::1"), denied("2001:db8::2"), denied("2001:db8::3")], [false, false, true]);
        assert!(!denied("2001:db8:0:1::1"));
        assert!(rates.request("10.0.0.1".parse().unwrap()).is_ok(), "without a bound");
        let refusal = rates.denial("10.0.0.1".parse().unwrap()).unwrap_err();
        assert_eq!(refusal.status, 429);
        assert!(refusal.message.contains("2 a second"), "{}", refusal.message);
    }

    #[test]
    fn a_session_changes_its_tools_a_minutes_worth_at_once_and_others_are_not_held_up() {
        let mut config = Config::default();
        config.max_tool_updates_per_minute = 3;
        let rates = Rates::new(&config, Arc::default());
        let (busy, other) = (SessionId::random(), SessionId::random());
        assert!((0..3).all(|_| rates.tool_update(busy).is_ok()));
        let refusal = rates.tool_update(busy).unwrap_err();
        assert_eq!(refusal.message, "Too many changes of this session's tools (3 a minute). Retry in 20 s.");
        assert!(rates.tool_update(other).is_ok());
    }

    #[test]
    fn who_was_there_before_keeps_a_bucket_of_its_own_when_there_are_too_many() {
        let buckets = Buckets::new(Quota::per_second(NonZeroU32::new(2).unwrap()), String::new(), 0, 10);
        assert!(buckets.take(&1));
        // Strangers, nine of whom still find room; the others share what is left.
        assert_eq!((2..100).filter(|stranger| buckets.take(stranger)).count(), 9 + 2);
        assert!(!buckets.take(&1000));
        assert!(buckets.take(&1), "it has taken one of its two");
        assert!(!buckets.take(&1));
        assert_eq!(buckets.buckets.len(), 11);
    }

    #[test]
    fn what_is_kept_does_not_grow_with_who_was_here() {
        let mut config = Config::default();
        config.max_denials_per_second_per_address = 1000;
        let rates = Rates::new(&config, Arc::default());
        for n in 0..1000_u32 {
            rates.denial(IpAddr::V4(n.into())).unwrap();
        }
        let kept = || rates.denials.as_ref().unwrap().buckets.len();
        assert_eq!(kept(), 1000);
        let since = std::time::Instant::now();
        while kept() > 0 {
            assert!(since.elapsed().as_secs() < 5);
            rates.sweep();
        }
    }
}
