//! The file of tenants as text: read, checked, and what is wrong with it said with its line and without its content.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use serde::Deserialize;
use toml::Spanned;

use super::{DEFAULT, Limits, Role};
use crate::auth::TokenHash;
use crate::proxy::config::{MOST_BYTES, MOST_COUNT};

/// The longest name of a tenant.
const MAX_NAME_BYTES: usize = 64;
/// How many names a warning lists.
const LISTED: usize = 10;

/// What the file must agree with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    /// The settings' own tokens.
    pub own: &'a [(TokenHash, &'static str)],
    /// Of a tenant that the file gives none.
    pub limits: Limits,
    /// The least that `max_request_bytes` may be.
    pub least_request_bytes: usize,
}

/// One tenant of the file.
#[derive(Debug)]
pub(super) struct Listed {
    pub name: String,
    pub tokens: Vec<(Role, TokenHash)>,
    pub limits: Limits,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    tenant: Vec<Written>,
}

/// A tenant as it is written.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
    name: Spanned<String>,
    #[serde(default)]
    app_token_sha256: Vec<Spanned<String>>,
    #[serde(default)]
    openclaw_token_sha256: Vec<Spanned<String>>,
    max_sessions: Option<Spanned<usize>>,
    max_calls: Option<Spanned<usize>>,
    max_request_bytes: Option<Spanned<usize>>,
}

/// Reads the text: its tenants, and what the operator should know though it is allowed.
///
/// # Errors
/// What is wrong, as the end of a sentence about the file.
pub(super) fn parse(text: &str, rules: Rules<'_>) -> Result<(Vec<Listed>, Vec<String>), String> {
    let file: File = toml::from_str(text)
        .map_err(|error| at(text, error.span().map_or(0, |span| span.start), &unquoted(error.message())))?;
    let mut reader = Reader { text, rules, names: HashMap::new(), tokens: HashMap::new() };
    let tenants: Vec<Listed> = file.tenant.iter().map(|written| reader.tenant(written)).collect::<Result<_, _>>()?;
    let warnings = warnings(&tenants);
    Ok((tenants, warnings))
}

fn at(text: &str, position: usize, what: &str) -> String {
    let before = text.get(..position.min(text.len())).unwrap_or(text);
    format!("cannot be used: line {}: {what}.", before.matches('\n').count() + 1)
}

/// What has been met so far.
struct Reader<'a> {
    text: &'a str,
    rules: Rules<'a>,
    names: HashMap<&'a str, usize>,
    tokens: HashMap<TokenHash, Place<'a>>,
}

/// Where a token stands.
struct Place<'a> {
    tenant: &'a str,
    member: &'static str,
    position: usize,
}

impl<'a> Reader<'a> {
    fn fault<T>(&self, position: usize, what: &str) -> Result<T, String> {
        Err(at(self.text, position, what))
    }

    fn line(&self, position: usize) -> usize {
        self.text[..position].matches('\n').count() + 1
    }

    fn tenant(&mut self, written: &'a Written) -> Result<Listed, String> {
        let (name, position) = (written.name.get_ref(), written.name.span().start);
        let is_name = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(is_name) {
            let what = format!(
                "an unusable name; it must have 1 to {MAX_NAME_BYTES} characters of A-Z, a-z, 0-9, '-', '_' and '.'"
            );
            return self.fault(position, &what);
        }
        if name == DEFAULT {
            return self.fault(position, "the tenant default is that of the settings' own tokens; choose another name");
        }
        if let Some(first) = self.names.insert(name, position) {
            return self
                .fault(position, &format!("the tenant {name} is there twice, first in line {}", self.line(first)));
        }
        let mut tokens = Vec::new();
        for (role, member, hashes) in [
            (Role::App, "app_token_sha256", &written.app_token_sha256),
            (Role::Client, "openclaw_token_sha256", &written.openclaw_token_sha256),
        ] {
            for hash in hashes {
                let place = Place { tenant: name, member, position: hash.span().start };
                tokens.push((role, self.token(hash.get_ref(), place)?));
            }
        }
        let defaults = self.rules.limits;
        let limits = Limits {
            sessions: self.limit(name, "max_sessions", &written.max_sessions, defaults.sessions, 1, MOST_COUNT)?,
            calls: self.limit(name, "max_calls", &written.max_calls, defaults.calls, 1, MOST_COUNT)?,
            request_bytes: self.limit(
                name,
                "max_request_bytes",
                &written.max_request_bytes,
                defaults.request_bytes,
                self.rules.least_request_bytes,
                MOST_BYTES,
            )?,
        };
        Ok(Listed { name: name.clone(), tokens, limits })
    }

    /// Each token has one owner and one side.
    fn token(&mut self, hash: &str, place: Place<'a>) -> Result<TokenHash, String> {
        let Place { tenant, member, position } = place;
        let Some(hash) = TokenHash::parse(hash) else {
            return self.fault(position, &format!("an unusable {member} of the tenant {tenant}; it must be the 64 hexadecimal digits that 'openclaw-mcp-proxy token' prints"));
        };
        if hash == TokenHash::of(b"") {
            return self.fault(
                position,
                &format!("an unusable {member} of the tenant {tenant}; it is the hash of an empty text"),
            );
        }
        let twice = format!("one token twice, in {member} of the tenant {tenant} and in");
        let each = "each token must have one owner and one side";
        if let Some((_, setting)) = self.rules.own.iter().find(|(own, _)| *own == hash) {
            return self.fault(position, &format!("{twice} {setting}; {each}"));
        }
        match self.tokens.entry(hash) {
            Entry::Vacant(free) => _ = free.insert(place),
            Entry::Occupied(taken) => {
                let Place { tenant, member, position: first } = taken.get();
                let line = self.text[..*first].matches('\n').count() + 1;
                let what = format!("{twice} {member} of the tenant {tenant} in line {line}; {each}");
                return self.fault(position, &what);
            }
        }
        Ok(hash)
    }

    fn limit(
        &self,
        tenant: &str,
        member: &str,
        written: &Option<Spanned<usize>>,
        default: usize,
        least: usize,
        most: u64,
    ) -> Result<usize, String> {
        let Some(written) = written else { return Ok(default) };
        let value = *written.get_ref();
        if value < least || value as u64 > most {
            let what = format!("the tenant {tenant} has {member} = {value}; it must be from {least} to {most}");
            return self.fault(written.span().start, &what);
        }
        Ok(value)
    }
}

fn warnings(tenants: &[Listed]) -> Vec<String> {
    let mut warnings = Vec::new();
    let without: Vec<&str> = tenants.iter().filter(|tenant| tenant.tokens.is_empty()).map(|t| &*t.name).collect();
    if !without.is_empty() {
        warnings.push(format!("Tenants without any token, which nobody can be: {}.", listed(&without)));
    }
    let mut seen = HashMap::from([(DEFAULT.to_owned(), DEFAULT)]);
    let alike: Vec<&str> = tenants
        .iter()
        .filter(|tenant| seen.insert(tenant.name.to_ascii_lowercase(), &tenant.name).is_some())
        .map(|tenant| &*tenant.name)
        .collect();
    if !alike.is_empty() {
        warnings.push(format!("Tenants whose names differ from others' in their case only: {}.", listed(&alike)));
    }
    warnings
}

fn listed(names: &[&str]) -> String {
    let more = names.len().saturating_sub(LISTED);
    let shown = names[..names.len() - more].join(", ");
    if more > 0 { format!("{shown} and {more} more") } else { shown }
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
