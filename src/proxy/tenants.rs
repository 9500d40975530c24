//! Who is who: tenants, their tokens, and how much of the proxy each may take.
//!
//! The two tokens of the settings are those of the tenant `default`. A file adds others; it is read again on demand,
//! and what is kept by name goes on: sessions, bridges and counts. A token says both whose it is and for which side;
//! no lookup of a session is made without its tenant.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use serde::Deserialize;

use crate::auth::{Denied, Token, TokenHash, denied};
use crate::proxy::config::Config;
use crate::proxy::metrics::Limit;

/// The tenant of the settings' two tokens.
pub const DEFAULT: &str = "default";
/// The longest name of a tenant.
const MAX_NAME_BYTES: usize = 64;

/// A tenant. Two are the same if their names are.
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

impl PartialEq for Tenant {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

/// An app, as its request shows it.
#[derive(Debug, Clone)]
pub struct AppCaller {
    /// Whose token it has.
    pub tenant: Arc<Tenant>,
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
    own: Table,
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
}

#[derive(Debug, Clone, Default)]
struct Side {
    tokens: Vec<(TokenHash, Arc<Tenant>)>,
    /// Whose a request without a known token is: nobody's, unless the side is open.
    anybody: Option<Arc<Tenant>>,
}

impl Side {
    /// Compares with every token, so that the time tells nothing of which one it was.
    fn find(&self, hash: &TokenHash) -> Option<&Arc<Tenant>> {
        self.tokens.iter().fold(None, |found, (known, tenant)| if known.matches(hash) { Some(tenant) } else { found })
    }
}

/// Why the file of tenants cannot be used: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TenantsError(String);

/// What reading the file again has changed.
#[derive(Debug)]
pub struct Reloaded {
    /// How many tenants there are now.
    pub tenants: usize,
    /// Those that are gone.
    pub gone: Vec<Arc<Tenant>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    #[serde(default)]
    app_token_sha256: Vec<String>,
    #[serde(default)]
    openclaw_token_sha256: Vec<String>,
    max_sessions: Option<usize>,
    max_calls: Option<usize>,
    max_request_bytes: Option<usize>,
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
        let side = |token: &Token| Side {
            tokens: (!token.is_empty())
                .then(|| (TokenHash::of(token.expose().as_bytes()), Arc::clone(&tenant)))
                .into_iter()
                .collect(),
            anybody: (token.is_empty() && !has_file).then(|| Arc::clone(&tenant)),
        };
        let own = Table {
            apps: side(&config.app_token),
            clients: side(&config.openclaw_token),
            tenants: vec![Arc::clone(&tenant)],
        };
        let tenants = Tenants {
            table: RwLock::new(Arc::new(own.clone())),
            own,
            limits,
            least_request_bytes: config.least_request_bytes(),
        };
        if let Some(file) = &config.tenants_file {
            tenants.reload(file)?;
        }
        Ok(tenants)
    }

    /// Reads the file again. Tenants of the same name go on, with the new tokens and limits.
    ///
    /// # Errors
    /// [`TenantsError`] if it cannot be used; then all is as it was.
    pub fn reload(&self, file: &Path) -> Result<Reloaded, TenantsError> {
        let refuse = |what: &dyn fmt::Display| TenantsError(format!("The file of tenants {} {what}", file.display()));
        let text = std::fs::read_to_string(file).map_err(|error| refuse(&format_args!("cannot be read: {error}.")))?;
        let read: File = toml::from_str(&text).map_err(|error| {
            let line = error.span().map_or(1, |span| text[..span.start.min(text.len())].matches('\n').count() + 1);
            refuse(&format_args!("cannot be used: line {line}: {}.", unquoted(error.message())))
        })?;
        let old = self.table();
        let mut table = self.own.clone();
        let mut limits = Vec::new();
        for entry in read.tenant {
            let name = &entry.name;
            let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
            if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_name) {
                return Err(refuse(&format_args!(
                    "has a tenant with an unusable name: it must have 1 to {MAX_NAME_BYTES} of the characters A-Z a-z 0-9 - _ ."
                )));
            }
            if table.tenants.iter().any(|tenant| *tenant.name == **name) {
                return Err(refuse(&format_args!("names the tenant {name} twice, or it is the settings' own.")));
            }
            let known = old.tenants.iter().find(|tenant| *tenant.name == **name);
            let tenant = known.cloned().unwrap_or_else(|| Arc::new(Tenant::new(name)));
            for (side, hashes, member) in [
                (&mut table.apps, &entry.app_token_sha256, "app_token_sha256"),
                (&mut table.clients, &entry.openclaw_token_sha256, "openclaw_token_sha256"),
            ] {
                for hash in hashes {
                    let hash = TokenHash::parse(hash).ok_or_else(|| {
                        refuse(&format_args!(
                            "has an unusable {member} for the tenant {name}: it must be the 64 hexadecimal digits that 'openclaw-mcp-proxy token' prints."
                        ))
                    })?;
                    side.tokens.push((hash, Arc::clone(&tenant)));
                }
            }
            let own = Limits {
                sessions: entry.max_sessions.unwrap_or(self.limits.sessions),
                calls: entry.max_calls.unwrap_or(self.limits.calls),
                request_bytes: entry.max_request_bytes.unwrap_or(self.limits.request_bytes),
            };
            if own.sessions == 0 || own.calls == 0 {
                return Err(refuse(&format_args!(
                    "gives the tenant {name} a limit of 0; max_sessions and max_calls must be at least 1."
                )));
            }
            if own.request_bytes < self.least_request_bytes {
                return Err(refuse(&format_args!(
                    "gives the tenant {name} {} max_request_bytes; it must be at least {}, twice OPENCLAW_PROXY_MAX_BODY_BYTES.",
                    own.request_bytes, self.least_request_bytes
                )));
            }
            limits.push((Arc::clone(&tenant), own));
            table.tenants.push(tenant);
        }
        let mut owners: BTreeMap<String, &str> = BTreeMap::new();
        for (hash, tenant) in table.apps.tokens.iter().chain(&table.clients.tokens) {
            if let Some(other) = owners.insert(hash.to_string(), &tenant.name)
                // The settings' own two are only warned of.
                && (*other != *tenant.name || other != DEFAULT)
            {
                return Err(refuse(&format_args!(
                    "has one token twice, for {other} and for {}: each token must have one owner and one side.",
                    tenant.name
                )));
            }
        }
        for (tenant, limits) in limits {
            tenant.limit(limits);
        }
        let gone = old.tenants.iter().filter(|tenant| !table.tenants.contains(tenant)).cloned().collect();
        let tenants = table.tenants.len();
        *self.table.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
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
        hash.and_then(|hash| side.find(hash)).or(side.anybody.as_ref()).cloned()
    }

    /// Whether MCP clients need a token.
    pub fn asks_clients_for_token(&self) -> bool {
        self.table().clients.anybody.is_none()
    }

    /// All of them.
    pub fn all(&self) -> Vec<Arc<Tenant>> {
        self.table().tenants.clone()
    }
}

/// What a parser says, without what it quotes: that may be a token that stands where it does not belong.
fn unquoted(message: &str) -> String {
    match message.rsplit_once(", expected ") {
        Some((found, expected)) => {
            let kind = found.split([':', '`', '"']).next().unwrap_or_default().trim_end();
            format!("{kind}, expected {expected}")
        }
        None => message.trim_end_matches('.').to_owned(),
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
            ("[[tenant]]\nname = \"default\"\n".to_owned(), "default twice"),
            ("[[tenant]]\nname = \"a\"\n[[tenant]]\nname = \"a\"\n".to_owned(), "a twice"),
            ("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"plain\"]\n".to_owned(), "64 hexadecimal digits"),
            ("[[tenant]]\nname = \"a\"\napp_token_sha256 = \"plain\"\n".to_owned(), "line 3: invalid type, expected a"),
            ("[[tenant]]\nname = \"a\"\nmax_calls = \"plain\"\n".to_owned(), "line 3: invalid type, expected"),
            ("[[tenant]]\nname = \"a\"\n\"plain\" = 1\n".to_owned(), "line 3: unknown field, expected one of"),
            ("[[tenant]]\nname = \"a\"\nmax_calls = 0\n".to_owned(), "at least 1"),
            ("[[tenant]]\nname = \"a\"\nmax_request_bytes = 8388607\n".to_owned(), "at least 8388608"),
            (
                format!(
                    "[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{one}\"]\n[[tenant]]\nname = \"b\"\nopenclaw_token_sha256 = [\"{two}\", \"{one}\"]\n"
                ),
                "one token twice, for a and for b",
            ),
            (format!("[[tenant]]\nname = \"a\"\napp_token_sha256 = [\"{}\"]\n", hash("own-app")), "one token twice"),
        ] {
            let error = tenants(&text).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("plain"), "{error}");
        }
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
        let reloaded = tenants.reload(&file).unwrap();
        assert_eq!((reloaded.tenants, reloaded.gone[0].name()), (2, "b"));
        assert!(tenants.find(Role::App, Some(b"old")).is_err() && tenants.find(Role::App, Some(b"b")).is_err());
        let after = tenants.find(Role::App, Some(b"new")).unwrap();
        assert!(Arc::ptr_eq(&before, &after));
        after.sessions().take().unwrap();
        assert_eq!(after.sessions().now(), 2);

        std::fs::write(&file, "nonsense").unwrap();
        assert!(tenants.reload(&file).is_err());
        assert!(tenants.find(Role::App, Some(b"new")).is_ok(), "all is as it was");
    }
}
