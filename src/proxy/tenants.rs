//! Who is who: tenants, their tokens, and how much of the proxy each may take.
//!
//! The two tokens of the settings are those of the tenant `default`. A file adds others; it is read again on demand,
//! and what is kept by name goes on: sessions, bridges and counts. A token says both whose it is and for which side;
//! no lookup of a session is made without its tenant.

mod file;

use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use foldhash::fast::RandomState;

use crate::auth::{Denied, Token, TokenHash, denied};
use crate::process;
use crate::proxy::config::Config;
use crate::proxy::metrics::Limit;

/// The tenant of the settings' two tokens.
pub const DEFAULT: &str = "default";

/// A tenant. One that is gone and comes back under the same name is another one: compare with [`Arc::ptr_eq`].
#[derive(Debug)]
pub struct Tenant {
    name: Box<str>,
    sessions: Count,
    calls: Count,
    request_bytes: Count,
    bridges: Count,
}

/// How much of the proxy a tenant may take.
#[derive(Debug, Clone, Copy)]
struct Limits {
    sessions: usize,
    calls: usize,
    request_bytes: usize,
}

/// How many there are of something, and may be.
#[derive(Debug, Default)]
pub struct Count {
    now: AtomicUsize,
    limit: AtomicUsize,
}

/// There are as many as allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Full {
    /// The limit.
    pub limit: usize,
}

impl Count {
    /// None yet, and at the most `limit`.
    pub fn new(limit: usize) -> Self {
        Count { now: AtomicUsize::new(0), limit: AtomicUsize::new(limit) }
    }

    /// How many there may be.
    pub fn limit(&self) -> usize {
        self.limit.load(Ordering::Relaxed)
    }

    /// How many there are.
    pub fn now(&self) -> usize {
        self.now.load(Ordering::Relaxed)
    }

    /// One more.
    ///
    /// # Errors
    /// [`Full`].
    pub fn take(&self) -> Result<(), Full> {
        self.take_some(1)
    }

    /// So many more.
    ///
    /// # Errors
    /// [`Full`]; then there are none more.
    pub fn take_some(&self, count: usize) -> Result<(), Full> {
        let limit = self.limit.load(Ordering::Relaxed);
        let more = |now: usize| now.checked_add(count).filter(|sum| *sum <= limit);
        self.now.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map(|_| ()).map_err(|_| Full { limit })
    }

    /// One less.
    pub fn give_back(&self) {
        self.give_back_some(1);
    }

    /// So many less.
    pub fn give_back_some(&self, count: usize) {
        self.now.fetch_sub(count, Ordering::Relaxed);
    }

    fn set_limit(&self, limit: usize) {
        self.limit.store(limit, Ordering::Relaxed);
    }
}

impl Tenant {
    /// One of this name, with nothing allowed yet.
    pub(super) fn new(name: &str) -> Self {
        Tenant {
            name: name.into(),
            sessions: Count::default(),
            calls: Count::default(),
            request_bytes: Count::default(),
            // Its sessions bound them.
            bridges: Count::new(usize::MAX),
        }
    }

    fn limit(&self, limits: Limits) {
        self.sessions.set_limit(limits.sessions);
        self.calls.set_limit(limits.calls);
        self.request_bytes.set_limit(limits.request_bytes);
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its sessions.
    pub fn sessions(&self) -> &Count {
        &self.sessions
    }

    /// Its calls in flight.
    pub fn calls(&self) -> &Count {
        &self.calls
    }

    /// The bytes of its requests in memory.
    pub fn request_bytes(&self) -> &Count {
        &self.request_bytes
    }

    /// Its bridges.
    pub fn bridges(&self) -> &Count {
        &self.bridges
    }
}

/// An app, as its request shows it.
#[derive(Debug, Clone)]
pub struct AppCaller {
    /// Whose token it has.
    pub tenant: Arc<Tenant>,
    /// Its token's hash, if it sends one.
    pub token: Option<TokenHash>,
    /// The hash of the session's secret that it sends, if it does.
    pub secret: Option<TokenHash>,
}

/// An MCP client, as its request shows it.
#[derive(Debug, Clone)]
pub struct Client {
    /// Whose token it has. `None` if it is nobody's; it may still be that of one session.
    pub tenant: Option<Arc<Tenant>>,
    /// Its token's hash.
    pub hash: Option<TokenHash>,
}

/// A call's place among those that its tenant, and everybody, may have in flight. Dropping it frees it.
#[derive(Debug)]
pub struct Place {
    tenant: Arc<Tenant>,
    all: Arc<Count>,
}

/// There are as many calls in flight as allowed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum TooManyCalls {
    /// Of the tenant.
    #[error("Too many calls in flight for this tenant ({0}). Retry in 1 s.")]
    Tenant(usize),
    /// In all.
    #[error("Too many calls in flight ({0}). Retry in 1 s.")]
    Everybody(usize),
}

impl TooManyCalls {
    /// The bound that was met.
    pub fn limit(self) -> Limit {
        match self {
            TooManyCalls::Tenant(_) => Limit::CallsPerTenant,
            TooManyCalls::Everybody(_) => Limit::Calls,
        }
    }
}

impl Place {
    /// Takes a place.
    ///
    /// # Errors
    /// [`TooManyCalls`].
    pub fn take(tenant: &Arc<Tenant>, all: &Arc<Count>) -> Result<Self, TooManyCalls> {
        tenant.calls.take().map_err(|full| TooManyCalls::Tenant(full.limit))?;
        all.take().map_err(|full| {
            tenant.calls.give_back();
            TooManyCalls::Everybody(full.limit)
        })?;
        Ok(Place { tenant: Arc::clone(tenant), all: Arc::clone(all) })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.tenant.calls.give_back();
        self.all.give_back();
    }
}

/// Which side a token is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Registration and bridge.
    App,
    /// The MCP endpoint.
    Client,
}

/// All tenants.
#[derive(Debug)]
pub struct Tenants {
    table: RwLock<Arc<Table>>,
    /// How often the table has changed.
    version: AtomicU64,
    own: Table,
    own_tokens: Vec<(TokenHash, &'static str)>,
    /// Of a tenant that the file gives none.
    limits: Limits,
    least_request_bytes: usize,
}

/// Whose each token is.
#[derive(Debug, Clone, Default)]
struct Table {
    apps: Side,
    clients: Side,
    tenants: Vec<Arc<Tenant>>,
    names: HashMap<Box<str>, Arc<Tenant>>,
}

/// The lookup's time may tell something of the hash that was asked for, and of those that are known; from the hash of
/// a random token nobody gets to the token.
#[derive(Debug, Clone, Default)]
struct Side {
    tokens: HashMap<TokenHash, Arc<Tenant>, RandomState>,
    /// Whose a request without a known token is: nobody's, unless the side is open.
    anybody: Option<Arc<Tenant>>,
}

impl Table {
    fn add(&mut self, tenant: &Arc<Tenant>) {
        self.tenants.push(Arc::clone(tenant));
        self.names.insert(tenant.name.clone(), Arc::clone(tenant));
    }

    fn has(&self, tenant: &Arc<Tenant>) -> bool {
        self.names.get(&tenant.name).is_some_and(|known| Arc::ptr_eq(known, tenant))
    }
}

/// Why the file of tenants cannot be used: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TenantsError(String);

impl TenantsError {
    fn new(file: &Path, what: &dyn fmt::Display) -> Self {
        TenantsError(format!("The file of tenants {} {what}", file.display()))
    }

    /// The file cannot be read.
    pub(super) fn unreadable(file: &Path, why: &dyn fmt::Display) -> Self {
        Self::new(
            file,
            &format_args!(
                "cannot be read: {why}; correct OPENCLAW_PROXY_TENANTS_FILE, or make it readable for the user that the proxy runs as."
            ),
        )
    }
}

/// What reading the file again has changed.
#[derive(Debug)]
pub struct Reloaded {
    /// How many tenants there are now.
    pub tenants: usize,
    /// Those that are gone.
    pub gone: Vec<Arc<Tenant>>,
}

impl Tenants {
    /// The tenants of these settings, file and all.
    ///
    /// # Errors
    /// [`TenantsError`] if the file cannot be used.
    pub fn new(config: &Config) -> Result<Self, TenantsError> {
        let tenant = Arc::new(Tenant::new(DEFAULT));
        let limits = Limits {
            sessions: config.max_sessions_per_tenant,
            calls: config.max_calls_per_tenant,
            request_bytes: config.max_request_bytes_per_tenant,
        };
        tenant.limit(limits);
        // With a file, an empty token is none; without one, it asks for none.
        let has_file = config.tenants_file.is_some();
        let hash_of = |token: &Token| TokenHash::of(token.expose().as_bytes());
        let side = |token: &Token| Side {
            tokens: (!token.is_empty()).then(|| (hash_of(token), Arc::clone(&tenant))).into_iter().collect(),
            anybody: (token.is_empty() && !has_file).then(|| Arc::clone(&tenant)),
        };
        let mut own =
            Table { apps: side(&config.app_token), clients: side(&config.openclaw_token), ..Table::default() };
        own.add(&tenant);
        let own_tokens = config.tokens().into_iter().filter(|(_, token)| !token.is_empty());
        let tenants = Tenants {
            table: RwLock::new(Arc::new(own.clone())),
            version: AtomicU64::new(0),
            own,
            own_tokens: own_tokens.map(|(name, token)| (hash_of(token), name)).collect(),
            limits,
            least_request_bytes: config.least_request_bytes(),
        };
        if let Some(file) = &config.tenants_file {
            let text = process::file::read(file).map_err(|error| TenantsError::unreadable(file, &error))?;
            tenants.reload(file, &text)?;
        }
        Ok(tenants)
    }

    /// Takes in the text of the file. Tenants of the same name go on, with the new tokens and limits.
    ///
    /// # Errors
    /// [`TenantsError`] if it cannot be used; then all is as it was.
    pub fn reload(&self, file: &Path, text: &str) -> Result<Reloaded, TenantsError> {
        let rules =
            file::Rules { own: &self.own_tokens, limits: self.limits, least_request_bytes: self.least_request_bytes };
        let (listed, warnings) = file::parse(text, rules).map_err(|what| TenantsError::new(file, &what))?;
        let old = self.table();
        let removed = old.tenants.len() - self.own.tenants.len();
        if listed.is_empty() && removed > 0 {
            return Err(TenantsError::new(
                file,
                &format_args!(
                    "has no [[tenant]] at all, as if it were not written yet, and would remove all {removed}; a start takes it."
                ),
            ));
        }
        let mut table = self.own.clone();
        let mut limits = Vec::new();
        for entry in listed {
            let known = old.names.get(&*entry.name).cloned();
            let tenant = known.unwrap_or_else(|| Arc::new(Tenant::new(&entry.name)));
            for (role, hash) in entry.tokens {
                let side = match role {
                    Role::App => &mut table.apps,
                    Role::Client => &mut table.clients,
                };
                side.tokens.insert(hash, Arc::clone(&tenant));
            }
            table.add(&tenant);
            limits.push((tenant, entry.limits));
        }
        for warning in warnings {
            tracing::warn!("{warning}");
        }
        for (tenant, limits) in limits {
            tenant.limit(limits);
        }
        let gone = old.tenants.iter().filter(|tenant| !table.has(tenant)).cloned().collect();
        let tenants = table.tenants.len();
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
        self.version.fetch_add(1, Ordering::Release);
        Ok(Reloaded { tenants, gone })
    }

    fn table(&self) -> Arc<Table> {
        Arc::clone(&self.table.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whose this token is on this side.
    ///
    /// # Errors
    /// [`Denied`] if it is nobody's.
    pub fn find(&self, role: Role, token: Option<&[u8]>) -> Result<Arc<Tenant>, Denied> {
        self.find_hash(role, token.map(TokenHash::of).as_ref()).ok_or_else(|| denied(token))
    }

    /// Whose the token with this hash is.
    pub fn find_hash(&self, role: Role, hash: Option<&TokenHash>) -> Option<Arc<Tenant>> {
        let table = self.table.read().unwrap_or_else(PoisonError::into_inner);
        let side = match role {
            Role::App => &table.apps,
            Role::Client => &table.clients,
        };
        hash.and_then(|hash| side.tokens.get(hash)).or(side.anybody.as_ref()).cloned()
    }

    /// Whether this is the one of its name that there is now.
    pub fn has(&self, tenant: &Arc<Tenant>) -> bool {
        self.table.read().unwrap_or_else(PoisonError::into_inner).has(tenant)
    }

    /// Whether a request with the token of this hash, or with none, is this tenant's.
    pub fn opens(&self, role: Role, hash: Option<&TokenHash>, tenant: &Arc<Tenant>) -> bool {
        self.find_hash(role, hash).is_some_and(|owner| Arc::ptr_eq(&owner, tenant))
    }

    /// Changes whenever somebody may have come or gone.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// Whether MCP clients need a token.
    pub fn asks_clients_for_token(&self) -> bool {
        self.table().clients.anybody.is_none()
    }

    /// The tenant of this name.
    pub fn named(&self, name: &str) -> Option<Arc<Tenant>> {
        self.table().tenants.iter().find(|tenant| *tenant.name == *name).cloned()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        self.table().tenants.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        Config::from_pairs(pairs.iter().map(|(name, value)| (format!("OPENCLAW_PROXY_{name}"), (*value).to_owned())))
            .unwrap()
    }

    fn hash(token: &str) -> String {
        TokenHash::of(token.as_bytes()).to_string()
    }

    /// Tenants of a file with this text.
    fn tenants(text: &str) -> Result<(Tenants, std::path::PathBuf), TenantsError> {
        let file = std::env::temp_dir().join(format!("openclaw-tenants-{}.toml", uuid::Uuid::new_v4()));
        std::fs::write(&file, text).unwrap();
        let config = config(&[
            ("APP_TOKEN", "own-app"),
            ("OPENCLAW_TOKEN", "own-claw"),
            ("TENANTS_FILE", file.to_str().unwrap()),
        ]);
        Tenants::new(&config).map(|tenants| (tenants, file))
    }

    fn whose(tenants: &Tenants, role: Role, token: &str) -> Option<String> {
        tenants.find(role, Some(token.as_bytes())).ok().map(|tenant| tenant.name().to_owned())
    }

    #[test]
    fn a_token_has_one_owner_and_one_side() {
        let text = format!(
            "[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{}\", \"{}\"]\nopenclaw_token_sha256 = [\"{}\"]\n",
            hash("a-app-1"),
            hash("a-app-2"),
            hash("a-claw")
        );
        let (tenants, _) = tenants(&text).unwrap();
        let (a, own) = (Some("a".to_owned()), Some(DEFAULT.to_owned()));
        for (token, app, client) in [
            ("a-app-1", &a, &None),
            ("a-app-2", &a, &None),
            ("a-claw", &None, &a),
            ("own-app", &own, &None),
            ("own-claw", &None, &own),
            ("a-app-3", &None, &None),
            ("", &None, &None),
        ] {
            assert_eq!(
                (&whose(&tenants, Role::App, token), &whose(&tenants, Role::Client, token)),
                (app, client),
                "{token}"
            );
        }
        assert_eq!(tenants.find(Role::App, None).unwrap_err(), Denied::Missing);
    }

    #[test]
    fn without_a_file_an_empty_token_opens_its_side_and_with_one_it_does_not() {
        let open = Tenants::new(&config(&[("OPENCLAW_TOKEN", "claw")])).unwrap();
        assert_eq!(whose(&open, Role::App, "anything").as_deref(), Some(DEFAULT));
        assert!(open.find(Role::App, None).is_ok() && open.find(Role::Client, None).is_err());
        let file = std::env::temp_dir().join(format!("openclaw-tenants-{}.toml", uuid::Uuid::new_v4()));
        std::fs::write(&file, "").unwrap();
        let closed = Tenants::new(&config(&[("TENANTS_FILE", file.to_str().unwrap())])).unwrap();
        assert!(closed.find(Role::App, None).is_err() && closed.find(Role::Client, Some(b"x")).is_err());
    }

    #[test]
    fn what_is_wrong_with_the_file_is_said_with_its_place_and_without_its_content() {
        let (one, two) = (hash("one"), hash("two"));
        for (text, expected) in [
            ("[[tenant]]\nname = 1\n".to_owned(), "line 2"),
            ("[[tenant]]\nnam = \"a\"\n".to_owned(), "unknown field"),
            ("[[tenant]]\nname = \"a b\"\n".to_owned(), "unusable name"),
            ("[[tenant]]\nname = \"default\"\n".to_owned(), "line 2: the tenant default is that of the settings"),
            (
                "[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"a\"\n".to_owned(),
                "line 4: the tenant a is there twice, first in line 2",
            ),
            ("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"plain\"]\n".to_owned(), "64 hexadecimal digits"),
            ("[[tenant]]\nname = \"a\"\napp_token_sha256 = \"plain\"\n".to_owned(), "line 3: invalid type, expected a"),
            ("[[tenant]]\nname = \"a\"\nmax_calls = \"plain\"\n".to_owned(), "line 3: invalid type, expected"),
            ("[[tenant]]\nname = \"a\"\n\"plain\" = 1\n".to_owned(), "line 3: unknown field, expected one of"),
            (
                "[[tenant]]\nname = \"a\"\nmax_calls = 0\n".to_owned(),
                "line 3: the tenant a has max_calls = 0; it must be from 1 to",
            ),
            ("[[tenant]]\nname = \"a\"\nmax_sessions = 9223372036854775807\n".to_owned(), "from 1 to 1000000000"),
            ("[[tenant]]\nname = \"a\"\nmax_request_bytes = 9223372036854775807\n".to_owned(), "to 1099511627776"),
            (
                format!("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\n\"{}\"]\n", hash("")),
                "line 4: an unusable app_token_sha256 of the tenant a; it is the hash of an empty text",
            ),
            (
                format!("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{one}\",\n\"{one}\"]\n"),
                "line 4: one token twice, in app_token_sha256 of the tenant a and in app_token_sha256 of the tenant a in line 3",
            ),
            ("[[tenant]]\nname = \"a\"\nmax_request_bytes = 8388607\n".to_owned(), "from 8388608 to"),
            (
                format!(
                    "[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{one}\"]\n[[tenant]]\nname = \"b\"\nopenclaw_token_sha256 = [\"{two}\", \"{one}\"]\n"
                ),
                "line 6: one token twice, in openclaw_token_sha256 of the tenant b and in app_token_sha256 of the tenant a in line 3",
            ),
            (
                format!("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{}\"]\n", hash("own-app")),
                "line 3: one token twice, in app_token_sha256 of the tenant a and in OPENCLAW_PROXY_APP_TOKEN",
            ),
        ] {
            let error = tenants(&text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("plain"), "{error}");
        }
    }

    #[test]
    fn many_tenants_cost_a_request_no_more_than_few() {
        let many: String = (0..20_000)
            .map(|n| format!("[[tenant]]\nname = \"t{n}\"\napp_token_sha256 = [\"{}\"]\n", hash(&n.to_string())))
            .collect();
        let (many, _) = tenants(&many).unwrap();
        let (few, _) = tenants("[[tenant]]\nname = \"a\"\n").unwrap();
        let time = |tenants: &Tenants| {
            let since = std::time::Instant::now();
            for n in 0..2000_u32 {
                assert!(tenants.find(Role::App, Some(&n.to_be_bytes()[..3])).is_err());
            }
            since.elapsed()
        };
        // The best of some, for others use the machine as well.
        let best = |tenants| (0..5).map(|_| time(tenants)).min().unwrap();
        let (few, many) = (best(&few), best(&many));
        assert!(many < 5 * few, "{many:?} {few:?}");
    }

    #[test]
    fn reading_it_again_keeps_who_is_still_there() {
        let entry = |name: &str, token: &str, limit: usize| {
            format!("[[tenant]]\nname = \"{name}\"\napp_token_sha256 = [\"{}\"]\nmax_sessions = {limit}\n", hash(token))
        };
        let (tenants, file) = tenants(&(entry("a", "old", 1) + &entry("b", "b", 1))).unwrap();
        let before = tenants.find(Role::App, Some(b"old")).unwrap();
        before.sessions().take().unwrap();
        assert_eq!(before.sessions().take(), Err(Full { limit: 1 }));
        std::fs::write(&file, entry("a", "new", 2)).unwrap();
        let reload = || tenants.reload(&file, &std::fs::read_to_string(&file).unwrap());
        let reloaded = reload().unwrap();
        assert_eq!((reloaded.tenants, reloaded.gone[0].name()), (2, "b"));
        assert!(tenants.find(Role::App, Some(b"old")).is_err() && tenants.find(Role::App, Some(b"b")).is_err());
        let after = tenants.find(Role::App, Some(b"new")).unwrap();
        assert!(Arc::ptr_eq(&before, &after));
        after.sessions().take().unwrap();
        assert_eq!(after.sessions().now(), 2);

        // A tenant that comes back is another one.
        assert!(!tenants.has(&reloaded.gone[0]) && tenants.has(&after));
        std::fs::write(&file, entry("a", "new", 2) + &entry("b", "b", 1)).unwrap();
        reload().unwrap();
        assert!(!tenants.has(&reloaded.gone[0]));
        let again = tenants.find(Role::App, Some(b"b")).unwrap();
        assert!(tenants.has(&again) && tenants.opens(Role::App, Some(&TokenHash::of(b"b")), &again));
        assert!(!tenants.opens(Role::App, Some(&TokenHash::of(b"b")), &reloaded.gone[0]));

        // What is not written yet removes nobody.
        std::fs::write(&file, "# alice and bob\n").unwrap();
        let error = reload().unwrap_err().to_string();
        assert!(error.contains("has no [[tenant]] at all") && error.contains("remove all 2"), "{error}");

        std::fs::write(&file, "nonsense").unwrap();
        assert!(reload().is_err());
        assert!(tenants.find(Role::App, Some(b"new")).is_ok(), "all is as it was");
    }
}
