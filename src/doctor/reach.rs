//! Whether there is a proxy at the URL at all: names, connections, TLS, and who answers.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures_util::future::join_all;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, DATE};
use http::{Method, StatusCode, Version};
use tokio::net::TcpStream;

use super::explain::{silence, unexpected};
use super::finding::{Check, Finding, Report};
use super::wire::{Answer, Base, CONNECT_TIMEOUT, Wire};
use super::{Stop, fixes, tls};
use crate::auth::Token;

/// The most addresses of a name that are tried.
const MAX_ADDRESSES: usize = 8;
/// From here on, clocks that differ are worth a word.
const CLOCK_WARNING: Duration = Duration::from_secs(30);
/// From here on, certificates and dates in logs mislead.
const CLOCK_PROBLEM: Duration = Duration::from_secs(300);

/// Finds a way to the deployment.
pub(super) async fn connect(base: &Base, report: &mut Report) -> Result<Wire, Stop> {
    let addresses = resolve(base, report).await?;
    let address = dial(base, &addresses, report).await?;
    let mut wire = Wire { base: base.clone(), address, tls: None };
    if !base.is_tls() {
        report.add(Finding::ok(Check::Tls, "None: the URL begins with http."));
        return Ok(wire);
    }
    let (config, verifier) = match tls::config() {
        Ok(both) => both,
        Err(why) => {
            report.add(Finding::problem(Check::Tls, why, Vec::new()));
            return Err(Stop);
        }
    };
    report.add(tls::check(&wire, &config, &verifier).await);
    if report.has_problem(Check::Tls) {
        // No token goes to somebody whom nobody vouches for.
        return Err(Stop);
    }
    wire.tls = Some(Arc::clone(&config));
    Ok(wire)
}

async fn resolve(base: &Base, report: &mut Report) -> Result<Vec<SocketAddr>, Stop> {
    let host = base.host();
    let found = tokio::time::timeout(CONNECT_TIMEOUT, tokio::net::lookup_host((host.as_str(), base.port()))).await;
    let why = match found {
        Ok(Ok(addresses)) => {
            let addresses: Vec<_> = addresses.collect::<BTreeSet<_>>().into_iter().take(MAX_ADDRESSES).collect();
            if !addresses.is_empty() {
                let list = addresses.iter().map(|address| address.ip().to_string()).collect::<Vec<_>>().join(", ");
                report.add(Finding::ok(Check::Dns, format!("{host} is {list}.")));
                return Ok(addresses);
            }
            "it has no address".to_owned()
        }
        Ok(Err(error)) => error.to_string(),
        Err(_) => format!("there is no answer within {CONNECT_TIMEOUT:?}"),
    };
    report.add(Finding::problem(Check::Dns, format!("The name {host} leads nowhere: {why}."), fixes::dns(&host)));
    Err(Stop)
}

async fn dial(base: &Base, addresses: &[SocketAddr], report: &mut Report) -> Result<SocketAddr, Stop> {
    let attempts = addresses.iter().map(async |address| {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(_)) => Ok(*address),
            Ok(Err(error)) => Err(format!("{}: {error}", address.ip())),
            Err(_) => Err(format!("{}: no answer within {CONNECT_TIMEOUT:?}", address.ip())),
        }
    });
    let (good, bad): (Vec<_>, Vec<_>) = join_all(attempts).await.into_iter().partition(Result::is_ok);
    let bad: Vec<String> = bad.into_iter().filter_map(Result::err).collect();
    let port = base.port();
    let Some(Ok(address)) = good.into_iter().next() else {
        let message = format!("Nothing can be connected to at port {port} ({}).", bad.join("; "));
        report.add(Finding::problem(Check::Tcp, message, fixes::listen(base)));
        return Err(Stop);
    };
    // "localhost" has two addresses nearly everywhere, and servers listen on one.
    report.add(if bad.is_empty() || base.is_loopback() {
        Finding::ok(Check::Tcp, format!("Port {port} can be connected to."))
    } else {
        let message = format!(
            "Some addresses of {} lead nowhere ({}): clients that choose them wait, or fail.",
            base.host(),
            bad.join("; ")
        );
        Finding::warning(Check::Tcp, message, fixes::dns(&base.host()))
    });
    Ok(address)
}

/// Finds out who answers, and what the front does to every answer.
pub(super) async fn health(wire: &Wire, report: &mut Report) -> Result<(), Stop> {
    let base = &wire.base;
    let before = SystemTime::now();
    let answer = match wire.send(wire.request(Method::GET, "/health", &Token::default()), "").await {
        Ok(answer) => answer,
        Err(error) => {
            report.add(silence(Check::Health, "GET /health", &error));
            return Err(Stop);
        }
    };
    if answer.status != StatusCode::OK {
        report.add(unexpected(base, Check::Health, "GET /health", &answer));
        return Err(Stop);
    }
    if answer.text().trim() != "ok" {
        let message =
            "Somebody else than OpenClaw MCP Proxy answers at this URL: its /health says something else than ok.";
        report.add(Finding::problem(Check::Path, message, fixes::path(base)));
        return Err(Stop);
    }
    report.add(Finding::ok(Check::Health, "The proxy answers."));
    report.add(Finding::ok(Check::Path, "The path leads to the proxy, and nobody is sent elsewhere."));
    report.add(http(&answer));
    report.add(clock(&answer, before));
    report.add(doubled(&answer));
    report.add(plain_http(wire).await);
    Ok(())
}

fn http(answer: &Answer) -> Finding {
    match answer.version {
        Version::HTTP_11 => Finding::ok(Check::Http, "The front speaks HTTP/1.1."),
        version => {
            let message = format!("The front speaks {version:?}; a bridge needs HTTP/1.1.");
            Finding::problem(Check::Http, message, fixes::http11_offered())
        }
    }
}

fn clock(answer: &Answer, before: SystemTime) -> Finding {
    let Some(date) = answer.header(DATE).and_then(|date| httpdate::parse_http_date(date).ok()) else {
        return Finding::ok(Check::Clock, "The front does not tell the time.");
    };
    let (difference, direction) = match before.duration_since(date) {
        Ok(behind) => (behind, "behind"),
        Err(ahead) => (ahead.duration(), "ahead of"),
    };
    let says = format!("The clock over there is {} s {direction} this machine's.", difference.as_secs());
    if difference >= CLOCK_PROBLEM {
        Finding::problem(Check::Clock, format!("{says} Certificates and logs mislead."), fixes::clock())
    } else if difference >= CLOCK_WARNING {
        Finding::warning(Check::Clock, says, fixes::clock())
    } else {
        Finding::ok(Check::Clock, "The clocks agree.")
    }
}

/// Headers of an answer that are there twice, where one is meant.
fn doubled(answer: &Answer) -> Finding {
    for name in [CONTENT_TYPE, DATE, CONTENT_ENCODING] {
        if answer.headers.get_all(&name).iter().count() > 1 {
            let message = format!("The answers have the header {name} twice: the front adds one of its own.");
            return Finding::problem(Check::DoubledHeaders, message, fixes::doubled(name.as_str()));
        }
    }
    Finding::ok(Check::DoubledHeaders, "No header is doubled.")
}

/// A client that was given a URL without TLS must not get through with its token.
async fn plain_http(wire: &Wire) -> Finding {
    let base = &wire.base;
    let check = Check::PlainHttp;
    if !base.is_tls() {
        return if base.is_loopback() {
            Finding::ok(check, "No TLS, and none is needed on this machine.")
        } else {
            let message = "There is no TLS: everybody on the way can read the tokens and all that tools say.";
            Finding::warning(check, message, fixes::tls())
        };
    }
    if base.port() != 443 {
        return Finding::ok(check, "Not looked for: the port is not 443.");
    }
    let plain = Wire { base: base.clone(), address: SocketAddr::new(wire.address.ip(), 80), tls: None };
    match plain.send(plain.request(Method::GET, "/health", &Token::default()), "").await {
        Ok(answer) if answer.status == StatusCode::OK && answer.text().trim() == "ok" => {
            let message =
                "Port 80 serves the proxy as well: a client with an http:// URL sends its token in the clear.";
            Finding::warning(check, message, fixes::no_plain_http())
        }
        _ => Finding::ok(check, "Port 80 does not serve the proxy."),
    }
}
