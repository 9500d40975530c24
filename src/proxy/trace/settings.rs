//! OpenTelemetry's own variables, as far as they are about traces: whether calls are traced, which, and where it is sent.
//!
//! Nothing is traced unless an endpoint is named (or `OTEL_TRACES_EXPORTER=otlp`, which means the default one). They may
//! stand in `.env` like every setting. What they cannot mean here is refused with one sentence, as it is with our own.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Uri};
use percent_encoding::percent_decode_str;

use crate::process;

/// The variables that are read here.
pub const NAMES: [&str; 17] = [
    "OTEL_SDK_DISABLED",
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
    "OTEL_EXPORTER_OTLP_TIMEOUT",
    "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT",
    "OTEL_SERVICE_NAME",
    "OTEL_RESOURCE_ATTRIBUTES",
    "OTEL_TRACES_SAMPLER",
    "OTEL_TRACES_SAMPLER_ARG",
    "OTEL_BSP_MAX_QUEUE_SIZE",
    "OTEL_BSP_MAX_EXPORT_BATCH_SIZE",
    "OTEL_BSP_SCHEDULE_DELAY",
];

/// The prefix of variables about sending.
const OTLP: &str = "OTEL_EXPORTER_OTLP_";
/// What is sent where nobody says where.
const DEFAULT_ENDPOINT: &str = "http://localhost:4318";
/// The most spans that may wait to be sent: beyond, it is a mistake.
const MOST_SPANS: u64 = 1_000_000;
/// The longest time that may be set: beyond, it is a mistake.
const MOST_MILLIS: u64 = 3_600_000;

/// How calls are traced.
#[derive(Debug, Clone, PartialEq)]
pub struct TraceSettings {
    /// Where spans are posted.
    pub endpoint: Uri,
    /// What is sent along; values are secrets.
    pub headers: HeaderMap,
    /// How long sending may take.
    pub timeout: Duration,
    /// What this process is called.
    pub resource: BTreeMap<String, String>,
    /// Which calls.
    pub sampler: Sampler,
    /// The most spans that wait to be sent.
    pub queue_spans: usize,
    /// The most that are sent at once.
    pub batch_spans: usize,
    /// How long a span waits for others to be sent with it.
    pub delay: Duration,
}

/// Which calls are kept.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampler {
    follows_parent: bool,
    /// From 0 to 1, of those without a parent to follow.
    ratio: f64,
}

impl Sampler {
    /// Whether a call is kept. `parent` is whether its client's span is, if it names one. Goes by the trace's id as the
    /// SDKs of other languages do, so that all who sample a trace decide alike.
    pub fn keeps(self, trace_id: u128, parent: Option<bool>) -> bool {
        const HALF: f64 = (1_u64 << 63) as f64;
        match parent {
            Some(is_kept) if self.follows_parent => is_kept,
            _ => ((trace_id as u64) >> 1) < (self.ratio * HALF) as u64,
        }
    }
}

/// Whether a variable is worth looking at.
pub fn is_ours(name: &str) -> bool {
    NAMES.contains(&name) || name.starts_with(OTLP)
}

/// Whether a value must not be shown: one that is for headers, or may have a password in a URL.
pub fn is_secret(name: &str, value: &str) -> bool {
    name.ends_with("_HEADERS") || value.contains('@')
}

/// The variables about sending traces that are set and do nothing.
pub fn unused(variables: &BTreeMap<String, String>) -> Vec<String> {
    let is_other = |name: &str| ["METRICS_", "LOGS_", "PROFILES_"].iter().any(|other| name.starts_with(other));
    let names = variables.keys().filter(|name| !NAMES.contains(&name.as_str()));
    names.filter(|name| name.strip_prefix(OTLP).is_some_and(|rest| !is_other(rest))).cloned().collect()
}

/// What the variables say; `None` if nothing is to be traced. Empty ones count as not set.
pub fn read(variables: &BTreeMap<String, String>, problems: &mut Vec<String>) -> Option<TraceSettings> {
    let mut reader = Reader { variables, problems };
    let is_disabled = reader.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let exporter = reader.get("OTEL_TRACES_EXPORTER");
    let endpoints = ["TRACES_ENDPOINT", "ENDPOINT"].map(|name| reader.get(&format!("{OTLP}{name}")));
    let is_wanted = exporter == Some("otlp") || endpoints.iter().any(Option::is_some);
    if is_disabled || exporter == Some("none") || !is_wanted {
        return None;
    }
    if let Some(other) = exporter.filter(|exporter| *exporter != "otlp") {
        reader.problem("OTEL_TRACES_EXPORTER", other, "traces are sent by otlp or not at all (none)");
    }
    if let (name, Some(protocol)) = reader.either("PROTOCOL")
        && protocol != "http/protobuf"
    {
        let remedy = "set it to http/protobuf, and the endpoint to the collector's port for that (4318 by default)";
        reader.problem(&name, protocol, remedy);
    }
    let (queue_spans, batch_spans) = reader.batches();
    Some(TraceSettings {
        endpoint: reader.endpoint(endpoints)?,
        headers: reader.headers(),
        timeout: reader.timeout(),
        resource: reader.resource(),
        sampler: reader.sampler()?,
        queue_spans,
        batch_spans,
        delay: Duration::from_millis(reader.number("OTEL_BSP_SCHEDULE_DELAY", 5000, (0, MOST_MILLIS))),
    })
}

struct Reader<'a> {
    variables: &'a BTreeMap<String, String>,
    problems: &'a mut Vec<String>,
}

impl<'a> Reader<'a> {
    fn get(&self, name: &str) -> Option<&'a str> {
        self.variables.get(name).map(|value| value.trim()).filter(|value| !value.is_empty())
    }

    /// What is set for traces, else what is set for all that is sent; and that variable's name.
    fn either(&self, name: &str) -> (String, Option<&'a str>) {
        let of_traces = format!("{OTLP}TRACES_{name}");
        match self.get(&of_traces) {
            Some(value) => (of_traces, Some(value)),
            None => (format!("{OTLP}{name}"), self.get(&format!("{OTLP}{name}"))),
        }
    }

    fn problem(&mut self, name: &str, value: &str, remedy: &str) {
        self.problems.push(format!("{name} is {}: {remedy}.", value.escape_debug()));
    }

    fn number(&mut self, name: &str, default: u64, (least, most): (u64, u64)) -> u64 {
        let Some(text) = self.get(name) else { return default };
        match text.parse() {
            Ok(number) if (least..=most).contains(&number) => number,
            _ => {
                self.problem(name, text, &format!("it must be a whole number from {least} to {most}"));
                default
            }
        }
    }

    fn batches(&mut self) -> (usize, usize) {
        let queue = self.number("OTEL_BSP_MAX_QUEUE_SIZE", 2048, (2, MOST_SPANS));
        let batch = self.number("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512.min(queue), (2, queue));
        (queue as usize, batch as usize)
    }

    fn timeout(&mut self) -> Duration {
        let (name, _) = self.either("TIMEOUT");
        Duration::from_millis(self.number(&name, 10_000, (1, MOST_MILLIS)))
    }

    /// Of traces, as it is written, or of everything, with the path of traces behind it.
    fn endpoint(&mut self, [of_traces, of_all]: [Option<&str>; 2]) -> Option<Uri> {
        let (name, text) = match (of_traces, of_all) {
            (Some(url), _) => ("TRACES_ENDPOINT", url.to_owned()),
            (None, url) => ("ENDPOINT", format!("{}/v1/traces", url.unwrap_or(DEFAULT_ENDPOINT).trim_end_matches('/'))),
        };
        let name = format!("{OTLP}{name}");
        let uri = text.parse::<Uri>().ok().filter(|uri| {
            let has_host = uri.host().is_some_and(|host| !host.is_empty());
            has_host && matches!(uri.scheme_str(), Some("http" | "https")) && !text.contains(['#', '@'])
        });
        if uri.is_none() {
            // It may hold a password, so it is not repeated.
            let remedy = "it must be of the form http://host:4318 or https://host, without a user and a password, which belong into";
            self.problems.push(format!("{name} is not usable: {remedy} {OTLP}HEADERS."));
        }
        uri
    }

    fn headers(&mut self) -> HeaderMap {
        let (name, text) = self.either("HEADERS");
        let mut headers = HeaderMap::new();
        for (key, value) in self.pairs(&name, text) {
            match (HeaderName::try_from(&key), HeaderValue::try_from(&value)) {
                (Ok(key), Ok(mut value)) => {
                    value.set_sensitive(true);
                    headers.insert(key, value);
                }
                _ => self.problems.push(format!("{name} holds what no header can carry; {PAIRS}.")),
            }
        }
        headers
    }

    fn resource(&mut self) -> BTreeMap<String, String> {
        const ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
        let mut resource = BTreeMap::from(
            [("service.name", "openclaw-mcp-proxy"), ("service.version", process::VERSION)]
                .map(|(name, value)| (name.to_owned(), value.to_owned())),
        );
        resource.extend(self.pairs(ATTRIBUTES, self.get(ATTRIBUTES)));
        if let Some(name) = self.get("OTEL_SERVICE_NAME") {
            resource.insert("service.name".into(), name.to_owned());
        }
        resource
    }

    /// `name=value,…`, values percent-encoded.
    fn pairs(&mut self, name: &str, text: Option<&str>) -> Vec<(String, String)> {
        let items = text.unwrap_or_default().split(',').map(str::trim).filter(|item| !item.is_empty());
        let pair = |item: &str| {
            let (key, value) = item.split_once('=').filter(|(key, _)| !key.trim().is_empty())?;
            Some((key.trim().to_owned(), percent_decode_str(value.trim()).decode_utf8().ok()?.into_owned()))
        };
        let pairs: Option<Vec<_>> = items.map(pair).collect();
        if pairs.is_none() {
            self.problems.push(format!("{name} is not usable; {PAIRS}."));
        }
        pairs.unwrap_or_default()
    }

    fn sampler(&mut self) -> Option<Sampler> {
        const NAME: &str = "OTEL_TRACES_SAMPLER";
        const ARGUMENT: &str = "OTEL_TRACES_SAMPLER_ARG";
        let text = self.get(NAME).unwrap_or("parentbased_always_on");
        let (follows_parent, kind) = match text.strip_prefix("parentbased_") {
            Some(kind) => (true, kind),
            None => (false, text),
        };
        let ratio = match kind {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => {
                let argument = self.get(ARGUMENT).unwrap_or("1");
                let ratio = argument.parse().ok().filter(|ratio| (0.0..=1.0).contains(ratio));
                if ratio.is_none() {
                    self.problem(ARGUMENT, argument, "it must be a number from 0 to 1");
                }
                ratio?
            }
            _ => {
                let remedy = "it must be always_on, always_off or traceidratio, or one of them behind parentbased_";
                self.problem(NAME, text, remedy);
                return None;
            }
        };
        Some(Sampler { follows_parent, ratio })
    }
}

/// How lists are written.
const PAIRS: &str = "write name=value,name=value, with %2C for a comma in a value";

#[cfg(test)]
mod tests {
    use super::*;

    fn read_all(pairs: &[(&str, &str)]) -> (Option<TraceSettings>, Vec<String>) {
        let variables = pairs.iter().map(|(name, value)| (format!("OTEL_{name}"), (*value).to_owned())).collect();
        let mut problems = Vec::new();
        (read(&variables, &mut problems), problems)
    }

    fn usable(pairs: &[(&str, &str)]) -> TraceSettings {
        let (settings, problems) = read_all(pairs);
        assert_eq!(problems, Vec::<String>::new());
        settings.unwrap()
    }

    const ON: (&str, &str) = ("EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318");

    #[test]
    fn nothing_is_traced_unless_somebody_wants_it() {
        for pairs in [
            &[][..],
            &[("SERVICE_NAME", "x"), ("TRACES_SAMPLER", "nonsense")],
            &[ON, ("SDK_DISABLED", "TRUE"), ("EXPORTER_OTLP_PROTOCOL", "grpc")],
            &[ON, ("TRACES_EXPORTER", "none")],
            &[("EXPORTER_OTLP_ENDPOINT", " ")],
        ] {
            assert_eq!(read_all(pairs), (None, vec![]), "{pairs:?}");
        }
        assert_eq!(usable(&[("TRACES_EXPORTER", "otlp")]).endpoint, "http://localhost:4318/v1/traces");
        assert_eq!(usable(&[ON, ("SDK_DISABLED", "no")]).endpoint, "http://127.0.0.1:4318/v1/traces");
    }

    #[test]
    fn the_variables_mean_what_opentelemetry_says() {
        let endpoint = |name, url| usable(&[ON, (name, url)]).endpoint.to_string();
        assert_eq!(endpoint("EXPORTER_OTLP_ENDPOINT", "https://c.example/otlp/"), "https://c.example/otlp/v1/traces");
        assert_eq!(endpoint("EXPORTER_OTLP_TRACES_ENDPOINT", "https://c.example/x"), "https://c.example/x");
        assert_eq!(endpoint("EXPORTER_OTLP_TRACES_ENDPOINT", "http://[::1]:4318"), "http://[::1]:4318/");
        let settings = usable(&[
            ON,
            ("EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20canary, x-b=c%2Cd=e"),
            ("EXPORTER_OTLP_TIMEOUT", "1500"),
            ("RESOURCE_ATTRIBUTES", "service.name=overruled,deployment.environment.name=a%20b"),
            ("SERVICE_NAME", "mine"),
        ]);
        assert_eq!(
            (&settings.headers["authorization"], &settings.headers["x-b"]),
            (&"Bearer canary".parse().unwrap(), &"c,d=e".parse().unwrap())
        );
        assert!(!format!("{settings:?}").contains("canary"));
        assert_eq!(settings.timeout, Duration::from_millis(1500));
        assert_eq!(settings.resource["service.name"], "mine");
        assert_eq!(settings.resource["deployment.environment.name"], "a b");
        let of_traces = [ON, ("EXPORTER_OTLP_HEADERS", "a=1"), ("EXPORTER_OTLP_TRACES_HEADERS", "b=2")];
        let names = usable(&of_traces).headers;
        assert_eq!(names.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["b"]);
        let default = usable(&[ON]);
        assert_eq!((default.queue_spans, default.batch_spans, default.delay), (2048, 512, Duration::from_secs(5)));
        assert_eq!(default.resource["service.name"], "openclaw-mcp-proxy");
    }

    #[test]
    fn what_cannot_be_meant_is_refused_with_the_remedy_and_without_secrets() {
        for (name, value, says) in [
            ("EXPORTER_OTLP_ENDPOINT", "localhost:4318", "http://host:4318"),
            ("EXPORTER_OTLP_ENDPOINT", "http://user:canary@host", "OTEL_EXPORTER_OTLP_HEADERS"),
            ("EXPORTER_OTLP_TRACES_ENDPOINT", "ftp://host", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"),
            ("EXPORTER_OTLP_PROTOCOL", "grpc", "4318"),
            ("EXPORTER_OTLP_TRACES_PROTOCOL", "http/json", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"),
            ("TRACES_EXPORTER", "zipkin", "none"),
            ("EXPORTER_OTLP_HEADERS", "canary", "name=value"),
            ("EXPORTER_OTLP_HEADERS", "a=canary%0A", "no header"),
            ("EXPORTER_OTLP_HEADERS", "a b=canary", "no header"),
            ("EXPORTER_OTLP_TIMEOUT", "0", "from 1"),
            ("EXPORTER_OTLP_TRACES_TIMEOUT", "10s", "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT"),
            ("RESOURCE_ATTRIBUTES", "=x", "name=value"),
            ("TRACES_SAMPLER", "xray", "traceidratio"),
            ("BSP_MAX_QUEUE_SIZE", "1000001", "1000000"),
            ("BSP_MAX_EXPORT_BATCH_SIZE", "2049", "2048"),
            ("BSP_SCHEDULE_DELAY", "-1", "whole number"),
        ] {
            let (_, problems) = read_all(&[ON, (name, value)]);
            let [problem] = &problems[..] else { panic!("{name}={value}: {problems:?}") };
            assert!(problem.contains(says) && problem.ends_with('.') && !problem.contains(['\n']), "{problem}");
            assert!(!problem.contains("canary"), "{problem}");
        }
        let ratio = [ON, ("TRACES_SAMPLER", "traceidratio"), ("TRACES_SAMPLER_ARG", "1.5")];
        assert!(read_all(&ratio).1[0].contains("from 0 to 1"));
    }

    #[test]
    fn samplers_follow_the_parent_or_the_trace() {
        let sampler = |name, ratio| usable(&[ON, ("TRACES_SAMPLER", name), ("TRACES_SAMPLER_ARG", ratio)]).sampler;
        let of = |sampler: Sampler| [None, Some(true), Some(false)].map(|parent| sampler.keeps(u128::MAX / 3, parent));
        assert_eq!(of(usable(&[ON]).sampler), [true, true, false]);
        assert_eq!(of(sampler("always_on", "")), [true, true, true]);
        assert_eq!(of(sampler("always_off", "")), [false, false, false]);
        assert_eq!(of(sampler("parentbased_always_off", "")), [false, true, false]);
        assert_eq!(of(sampler("parentbased_traceidratio", "0")), [false, true, false]);
        let ratio = sampler("traceidratio", "0.25");
        let quarter = u128::from(u64::MAX / 4);
        assert_eq!(
            [0, quarter - 9, quarter + 9, u128::MAX].map(|id| ratio.keeps(id, None)),
            [true, true, false, false]
        );
        assert!(sampler("traceidratio", "1").keeps(u128::MAX, None));
    }

    #[test]
    fn variables_that_do_nothing_are_pointed_out() {
        let names = ["ENDPIONT", "COMPRESSION", "METRICS_ENDPOINT", "LOGS_HEADERS", "ENDPOINT"];
        let variables = names.map(|name| (format!("OTEL_EXPORTER_OTLP_{name}"), "x".to_owned()));
        let variables = BTreeMap::from_iter(variables.into_iter().chain([("OTEL_LOG_LEVEL".into(), "x".into())]));
        assert_eq!(unused(&variables), ["OTEL_EXPORTER_OTLP_COMPRESSION", "OTEL_EXPORTER_OTLP_ENDPIONT"]);
    }
}
