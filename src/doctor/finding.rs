//! What was found: one finding for each check, in words and with the lines that mend it.

use std::io::{self, Write};

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::auth::Token;

/// What is checked, in the order in which it is told. The names are stable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Check {
    /// The name has addresses.
    Dns,
    /// They can be connected to.
    Tcp,
    /// The certificate is one that clients take.
    Tls,
    /// What is served without TLS.
    PlainHttp,
    /// The proxy answers, and not somebody else.
    Health,
    /// The path leads to the proxy, and clients are not sent elsewhere.
    Path,
    /// The front speaks HTTP/1.1.
    Http,
    /// The two clocks agree.
    Clock,
    /// The proxy takes the public Host.
    Host,
    /// No header is given twice.
    DoubledHeaders,
    /// `Authorization` arrives.
    Authorization,
    /// Nobody gets in without a token.
    NoToken,
    /// The app token.
    AppToken,
    /// The OpenClaw token.
    OpenclawToken,
    /// Each token opens its own side alone.
    TokensApart,
    /// An app can register.
    Registration,
    /// The URLs of a registration lead back to where it was made.
    PublicUrls,
    /// What strangers say of the public URL is not believed.
    SpoofedHeaders,
    /// PUT and DELETE get through.
    Methods,
    /// The bridge's upgrade.
    Websocket,
    /// A browser's bridge, whose token is a subprotocol.
    BrowserBridge,
    /// initialize, tools/list, tools/call.
    RoundTrip,
    /// Arguments, schemas and results arrive as they were sent.
    Unchanged,
    /// Bodies are not compressed on the way.
    Compression,
    /// The session's headers arrive.
    SessionHeaders,
    /// The headers of MCP arrive.
    McpHeaders,
    /// A slash at the end leads nowhere else.
    TrailingSlash,
    /// Web pages that were not invited are refused.
    Origin,
    /// Large requests and results.
    BodySize,
    /// Events arrive while a call runs.
    Streaming,
    /// The app hears of a client that has gone.
    Cancel,
    /// A silent bridge stays open.
    IdleBridge,
    /// A long call is not cut.
    LongCall,
}

impl Check {
    /// All of them, with their names.
    pub const ALL: [(Check, &'static str); 33] = [
        (Check::Dns, "dns"),
        (Check::Tcp, "tcp"),
        (Check::Tls, "tls"),
        (Check::PlainHttp, "plain_http"),
        (Check::Health, "health"),
        (Check::Path, "path"),
        (Check::Http, "http"),
        (Check::Clock, "clock"),
        (Check::Host, "host"),
        (Check::DoubledHeaders, "doubled_headers"),
        (Check::Authorization, "authorization"),
        (Check::NoToken, "no_token"),
        (Check::AppToken, "app_token"),
        (Check::OpenclawToken, "openclaw_token"),
        (Check::TokensApart, "tokens_apart"),
        (Check::Registration, "registration"),
        (Check::PublicUrls, "public_urls"),
        (Check::SpoofedHeaders, "spoofed_headers"),
        (Check::Methods, "methods"),
        (Check::Websocket, "websocket"),
        (Check::BrowserBridge, "browser_bridge"),
        (Check::RoundTrip, "round_trip"),
        (Check::Unchanged, "unchanged"),
        (Check::Compression, "compression"),
        (Check::SessionHeaders, "session_headers"),
        (Check::McpHeaders, "mcp_headers"),
        (Check::TrailingSlash, "trailing_slash"),
        (Check::Origin, "origin"),
        (Check::BodySize, "body_size"),
        (Check::Streaming, "streaming"),
        (Check::Cancel, "cancel"),
        (Check::IdleBridge, "idle_bridge"),
        (Check::LongCall, "long_call"),
    ];

    /// The stable name.
    pub fn name(self) -> &'static str {
        Check::ALL.iter().find(|(check, _)| *check == self).map_or("", |(_, name)| name)
    }
}

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// All is well.
    Ok,
    /// It works, and somebody should know of it.
    Warning,
    /// Something does not work, or is not safe.
    Problem,
    /// It could not be tried, because of another problem.
    Skipped,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Warning => "warning",
            State::Problem => "problem",
            State::Skipped => "skipped",
        }
    }
}

/// What mends a problem: where, and the line.
pub type Fix = (&'static str, String);

/// How a check ended, and why.
#[derive(Debug, Clone)]
pub struct Finding {
    /// Which check.
    pub check: Check,
    /// How it ended.
    pub state: State,
    /// A sentence or two for whoever runs the deployment.
    pub message: String,
    /// Lines for the front, or for the proxy's settings.
    pub fixes: Vec<Fix>,
}

impl Finding {
    /// All is well.
    pub fn ok(check: Check, message: impl Into<String>) -> Self {
        Finding { check, state: State::Ok, message: message.into(), fixes: Vec::new() }
    }

    /// Something to know.
    pub fn warning(check: Check, message: impl Into<String>, fixes: Vec<Fix>) -> Self {
        Finding { check, state: State::Warning, message: message.into(), fixes }
    }

    /// Something to mend.
    pub fn problem(check: Check, message: impl Into<String>, fixes: Vec<Fix>) -> Self {
        Finding { check, state: State::Problem, message: message.into(), fixes }
    }
}

/// All that was found at one URL.
#[derive(Debug)]
pub struct Report {
    url: String,
    findings: Vec<Finding>,
    /// Never told, whoever repeats them to us.
    secrets: Vec<String>,
}

impl Report {
    /// Nothing was found yet. The tokens are blotted out wherever they might turn up.
    pub fn new(url: impl Into<String>, tokens: [&Token; 2]) -> Self {
        let secrets = tokens.iter().filter(|token| !token.is_empty()).map(|token| token.expose().to_owned()).collect();
        Report { url: url.into(), findings: Vec::new(), secrets }
    }

    /// Adds a finding. Of two for one check, the worse one stays.
    pub fn add(&mut self, mut finding: Finding) {
        for secret in &self.secrets {
            finding.message = finding.message.replace(secret, "***");
        }
        match self.findings.iter_mut().find(|known| known.check == finding.check) {
            Some(known) if known.state == State::Ok || finding.state == State::Problem && !known.is_problem() => {
                *known = finding;
            }
            Some(_) => {}
            None => self.findings.push(finding),
        }
    }

    /// Whether a check has found a problem.
    pub fn has_problem(&self, check: Check) -> bool {
        self.findings.iter().any(|finding| finding.check == check && finding.is_problem())
    }

    /// Completes the report: what was not tried is skipped.
    pub fn finish(&mut self) {
        for (check, _) in Check::ALL {
            if !self.findings.iter().any(|finding| finding.check == check) {
                let message = "Not tried, because of another problem.".to_owned();
                self.findings.push(Finding { check, state: State::Skipped, message, fixes: Vec::new() });
            }
        }
        self.findings.sort_by_key(|finding| finding.check);
    }

    /// What was found.
    pub fn findings(&self) -> &[Finding] {
        &self.findings
    }

    /// Whether nothing needs to be mended.
    pub fn is_well(&self) -> bool {
        !self.findings.iter().any(Finding::is_problem)
    }

    /// Writes it for people: a line for each check, and under it what mends it.
    ///
    /// # Errors
    /// If `out` cannot be written.
    pub fn print(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(out, "{}", self.url)?;
        let is = |state| move |finding: &&Finding| finding.state == state;
        for finding in self.findings.iter().filter(|finding| finding.state != State::Skipped) {
            writeln!(out, "{:8} {:16} {}", finding.state.name(), finding.check.name(), finding.message)?;
            for (place, line) in &finding.fixes {
                writeln!(out, "{:25} {place}: {line}", "")?;
            }
        }
        let skipped: Vec<&str> =
            self.findings.iter().filter(is(State::Skipped)).map(|finding| finding.check.name()).collect();
        if !skipped.is_empty() {
            writeln!(out, "not tried, because of a problem above: {}", skipped.join(", "))?;
        }
        let count = |state| self.findings.iter().filter(is(state)).count();
        let plural = |count, word: &str| format!("{count} {word}{}", if count == 1 { "" } else { "s" });
        let (problems, warnings) = (count(State::Problem), count(State::Warning));
        writeln!(out, "{}, {}.", plural(problems, "problem"), plural(warnings, "warning"))?;
        out.flush()
    }
}

impl Finding {
    fn is_problem(&self) -> bool {
        self.state == State::Problem
    }
}

/// `{"state", "message", "fixes": [{"for", "line"}]}`.
impl Serialize for Finding {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let fixes = self.fixes.iter().map(|(place, line)| serde_json::json!({ "for": place, "line": line }));
        let mut object = serializer.serialize_struct("Finding", 3)?;
        object.serialize_field("state", self.state.name())?;
        object.serialize_field("message", &self.message)?;
        object.serialize_field("fixes", &fixes.collect::<Vec<_>>())?;
        object.end()
    }
}

/// `{"url", "ok", "checks": {"<name>": …}}`.
impl Serialize for Report {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Checks<'a>(&'a [Finding]);
        impl Serialize for Checks<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_map(self.0.iter().map(|finding| (finding.check.name(), finding)))
            }
        }
        let mut object = serializer.serialize_struct("Report", 3)?;
        object.serialize_field("url", &self.url)?;
        object.serialize_field("ok", &self.is_well())?;
        object.serialize_field("checks", &Checks(&self.findings))?;
        object.end()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_has_a_name_of_its_own_in_the_order_of_telling() {
        let mut names: Vec<&str> = Check::ALL.iter().map(|(_, name)| *name).collect();
        assert!(Check::ALL.is_sorted());
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Check::ALL.len());
    }

    #[test]
    fn a_token_that_somebody_repeats_to_us_is_not_told() {
        let mut report = Report::new("https://x", [&Token::new("canary"), &Token::default()]);
        report.add(Finding::problem(Check::Health, "It says: Bearer canary.", Vec::new()));
        report.finish();
        let mut text = serde_json::to_vec(&report).unwrap();
        report.print(&mut text).unwrap();
        assert!(!String::from_utf8(text).unwrap().contains("canary"));
    }

    #[test]
    fn the_worse_of_two_findings_stays() {
        let mut report = Report::new("https://x", [&Token::default(), &Token::default()]);
        for finding in [
            Finding::ok(Check::Http, "fine"),
            Finding::problem(Check::Http, "bad", Vec::new()),
            Finding::warning(Check::Http, "odd", Vec::new()),
        ] {
            report.add(finding);
        }
        assert_eq!(report.findings()[0].message, "bad");
        assert!(!report.is_well() && report.has_problem(Check::Http));
    }
}
