//! Who gets in: each token on its own side, none on the other, and nobody without one.

use http::{Method, StatusCode};
use serde_json::Value;

use super::explain::{sentence, silence, unexpected};
use super::finding::{Check, Finding, Report};
use super::wire::Wire;
use super::{Options, Stop, fixes};
use crate::auth::{Denied, Token};
use crate::protocol::SessionId;

const PING: &str = r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#;

/// One of the proxy's two sides.
#[derive(Clone, Copy)]
enum Side {
    Apps,
    Clients,
}

impl Side {
    fn check(self) -> Check {
        match self {
            Side::Apps => Check::AppToken,
            Side::Clients => Check::OpenclawToken,
        }
    }

    fn setting(self) -> &'static str {
        match self {
            Side::Apps => "OPENCLAW_PROXY_APP_TOKEN",
            Side::Clients => "OPENCLAW_PROXY_OPENCLAW_TOKEN",
        }
    }

    fn flag(self) -> &'static str {
        match self {
            Side::Apps => "--app-token-file",
            Side::Clients => "--openclaw-token-file",
        }
    }

    fn what(self) -> &'static str {
        match self {
            Side::Apps => "an app's GET of a session",
            Side::Clients => "an MCP client's ping",
        }
    }

    fn who(self) -> &'static str {
        match self {
            Side::Apps => "apps",
            Side::Clients => "MCP clients",
        }
    }
}

/// What became of an attempt to get in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    In,
    /// The proxy saw no token.
    Missing,
    /// The proxy saw another token than its own.
    Invalid,
}

/// Tries a token; an answer that says neither yes nor no ends the examination.
async fn knock(wire: &Wire, side: Side, token: &Token, report: &mut Report) -> Result<Entry, Stop> {
    let (request, body) = match side {
        Side::Apps => {
            let nowhere = format!("/v1/chat/sessions/{}", SessionId::random());
            (wire.request(Method::GET, &nowhere, token), "")
        }
        Side::Clients => (wire.post("/v1/mcp", token), PING),
    };
    let answer = match wire.send(request, body).await {
        Ok(answer) => answer,
        Err(error) => {
            report.add(silence(side.check(), side.what(), &error));
            return Err(Stop);
        }
    };
    let says = sentence(&answer).unwrap_or_default();
    match (side, answer.status) {
        (Side::Apps, StatusCode::NOT_FOUND) if says.contains("session") => return Ok(Entry::In),
        (Side::Clients, StatusCode::OK) => {
            let is_pong = |body: Value| body.get("result").is_some();
            if serde_json::from_slice(&answer.body).is_ok_and(is_pong) {
                return Ok(Entry::In);
            }
        }
        (_, StatusCode::UNAUTHORIZED) if says == Denied::Missing.to_string() => return Ok(Entry::Missing),
        (_, StatusCode::UNAUTHORIZED) if !says.is_empty() => return Ok(Entry::Invalid),
        _ => {}
    }
    report.add(unexpected(&wire.base, side.check(), side.what(), &answer));
    Err(Stop)
}

/// Tries all that there is to try. Stops unless an app and a client get in.
pub(super) async fn check(wire: &Wire, options: &Options, report: &mut Report) -> Result<(), Stop> {
    let none = Token::default();
    let own = [(Side::Apps, &options.app_token), (Side::Clients, &options.openclaw_token)];
    let mut strangers = [Entry::In; 2];
    for (at, (side, _)) in own.iter().enumerate() {
        strangers[at] = knock(wire, *side, &none, report).await?;
    }
    report.add(Finding::ok(Check::Host, format!("The proxy takes the Host {}.", wire.base.authority())));
    let mut entries = strangers;
    for (at, (side, token)) in own.iter().enumerate() {
        if !token.is_empty() {
            entries[at] = knock(wire, *side, token, report).await?;
        }
    }
    report.add(authorization(own, entries));
    if report.has_problem(Check::Authorization) {
        return Err(Stop);
    }
    report.add(no_token(wire, own, strangers));
    let is_swapped = entries.contains(&Entry::Invalid)
        && knock(wire, Side::Apps, &options.openclaw_token, report).await? == Entry::In
        && knock(wire, Side::Clients, &options.app_token, report).await? == Entry::In
        && !strangers.contains(&Entry::In);
    if is_swapped {
        let message = "The two tokens are swapped: each opens the other's side.";
        report.add(Finding::problem(Check::TokensApart, message, fixes::swapped()));
        return Err(Stop);
    }
    for ((side, token), entry) in own.iter().zip(entries) {
        report.add(own_side(*side, token, entry));
    }
    let apart = apart(wire, options, entries, report).await?;
    report.add(apart);
    if entries.contains(&Entry::Invalid) || entries.contains(&Entry::Missing) { Err(Stop) } else { Ok(()) }
}

fn authorization(own: [(Side, &Token); 2], entries: [Entry; 2]) -> Finding {
    let lost = own.iter().zip(entries).find(|((_, token), entry)| !token.is_empty() && *entry == Entry::Missing);
    match lost {
        Some(((side, _), _)) => {
            let message = format!(
                "The token of {} was sent and did not arrive: the front takes the header Authorization away.",
                side.who()
            );
            Finding::problem(Check::Authorization, message, fixes::authorization())
        }
        None => Finding::ok(Check::Authorization, "The header Authorization arrives."),
    }
}

fn no_token(wire: &Wire, own: [(Side, &Token); 2], strangers: [Entry; 2]) -> Finding {
    let open: Vec<Side> =
        own.iter().zip(strangers).filter(|(_, entry)| *entry == Entry::In).map(|((side, _), _)| *side).collect();
    let Some(side) = open.first() else {
        return Finding::ok(Check::NoToken, "Nobody gets in without a token.");
    };
    let who = open.iter().map(|side| side.who()).collect::<Vec<_>>().join(" and ");
    let message = format!("No token is asked of {who}: anybody who knows the URL gets in.");
    match wire.base.is_loopback() && !wire.base.is_tls() {
        true => Finding::ok(Check::NoToken, format!("No token is asked of {who}, on this machine.")),
        false => Finding::problem(Check::NoToken, message, fixes::needs_token(side.setting())),
    }
}

fn own_side(side: Side, token: &Token, entry: Entry) -> Finding {
    let (check, who) = (side.check(), side.who());
    let fixes = || fixes::token(side.setting(), side.flag());
    match entry {
        Entry::In if token.is_empty() => Finding::ok(check, format!("None is asked of {who}.")),
        Entry::In => Finding::ok(check, format!("The token of {who} is valid.")),
        Entry::Invalid => {
            Finding::problem(check, format!("The token of {who} is not the one that the proxy has."), fixes())
        }
        Entry::Missing => {
            Finding::problem(check, format!("The proxy asks {who} for a token, and none is set here."), fixes())
        }
    }
}

/// A valid token must not open the other side.
async fn apart(wire: &Wire, options: &Options, entries: [Entry; 2], report: &mut Report) -> Result<Finding, Stop> {
    let (app, client) = (&options.app_token, &options.openclaw_token);
    let check = Check::TokensApart;
    if app.is_empty() || client.is_empty() {
        return Ok(Finding::ok(check, "Not tried: there are not two tokens."));
    }
    if app.expose() == client.expose() {
        let message = "Both tokens are the same: whoever may call tools may register some, and the other way round.";
        return Ok(Finding::problem(check, message, fixes::same_tokens()));
    }
    for (side, token, own) in [(Side::Clients, app, entries[0]), (Side::Apps, client, entries[1])] {
        let stranger = Token::new(SessionId::random().to_string());
        let gets_in = own == Entry::In && knock(wire, side, token, report).await? == Entry::In;
        // Where everybody gets in, that is said already.
        if gets_in && knock(wire, side, &stranger, report).await? != Entry::In {
            let message = format!("The other side's token opens the side of {} as well.", side.who());
            return Ok(Finding::problem(check, message, fixes::same_tokens()));
        }
    }
    Ok(Finding::ok(check, "Each token opens its own side alone."))
}
