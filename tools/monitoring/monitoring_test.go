// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package monitoring

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/hive"
	"github.com/cilium/hive/cell"
	"github.com/cilium/hive/job"
	"github.com/cilium/statedb"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/histogram"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/tsdb/chunkenc"
	"github.com/prometheus/prometheus/tsdb/chunks"
	"github.com/prometheus/prometheus/util/annotations"
	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/operator/pkg/networkdriver/config"
	"github.com/cilium/networkdriver/operator/pkg/networkdriver/networks"
	"github.com/cilium/networkdriver/pkg/client"
	"github.com/cilium/networkdriver/pkg/health"
	"github.com/cilium/networkdriver/pkg/networkdriver"
)

const (
	root   = "../.."
	files  = root + "/install/helm/cilium-network-driver/files/monitoring/"
	prefix = "cilium_networkdriver_"
	// step is the time between two scrapes, and length that of all of them.
	step, length = 30 * time.Second, 2 * time.Hour
)

// targetLabels are those that the chart's monitors give each series.
var targetLabels = []string{"namespace", "pod", "job", "instance", "node"}

// described registers what a program registers, and notes the metrics with their labels.
type described struct {
	prometheus.Registerer
	metrics map[string][]string
}

var descPattern = regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)

func (d *described) Register(c prometheus.Collector) error {
	descs := make(chan *prometheus.Desc)
	go func() {
		c.Describe(descs)
		close(descs)
	}()
	for desc := range descs {
		m := descPattern.FindStringSubmatch(desc.String())
		if m == nil {
			return fmt.Errorf("cannot read %s", desc)
		}
		d.metrics[m[1]] = strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' || r == ' ' })
	}
	return d.Registerer.Register(c)
}

// metrics returns the metrics of agent and operator, as their cells register them, with the labels of each.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	for _, cells := range [][]cell.Cell{{networkdriver.Cell}, {config.Cell, networks.Cell}} {
		opts := hive.DefaultOptions()
		opts.ModulePrivateProviders = cell.ModulePrivateProviders{
			func(jobs job.Registry, health cell.Health, log *slog.Logger, id cell.ModuleID) job.Group {
				return jobs.NewGroup(health.NewScope(string(id)), job.WithLogger(log))
			},
		}
		d := &described{prometheus.NewRegistry(), all}
		h := hive.NewWithOptions(opts, append(cells, job.Cell, cell.SimpleHealthCell, statedb.Cell, client.Cell, health.Cell,
			cell.Provide(func() prometheus.Registerer { return d }))...)
		kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
		require.NoError(t, os.WriteFile(kubeconfig, []byte(`{"clusters":[{"name":"c","cluster":{"server":"http://127.0.0.1:1"}}],`+
			`"contexts":[{"name":"c","context":{"cluster":"c"}}],"current-context":"c"}`), 0o600))
		h.Viper().Set("k8s-kubeconfig-path", kubeconfig)
		h.Viper().Set("enable-network-driver", true)
		require.NoError(t, h.Populate(slog.New(slog.DiscardHandler)))
	}
	require.Greater(t, len(all), 30)
	return all
}

// query is one of the dashboard or of an alert.
type query struct{ where, expr string }

func dashboard(t *testing.T) (queries []query) {
	t.Helper()
	raw, err := os.ReadFile(files + "dashboard.json")
	require.NoError(t, err)
	var d struct {
		Panels []struct {
			Title   string
			Targets []struct{ Expr string }
		}
		Templating struct {
			List []struct {
				Name  string
				Query any
			}
		}
	}
	require.NoError(t, json.Unmarshal(raw, &d))
	variables := strings.NewReplacer("$__rate_interval", "5m", "$node", ".*", "$namespace", ".*")
	for _, panel := range d.Panels {
		require.NotEmpty(t, panel.Targets, panel.Title)
		for _, target := range panel.Targets {
			queries = append(queries, query{"panel " + panel.Title, variables.Replace(target.Expr)})
		}
	}
	for _, v := range d.Templating.List {
		if q, ok := v.Query.(map[string]any); ok { // label_values(METRIC, LABEL)
			metric, label, ok := strings.Cut(strings.TrimSuffix(strings.TrimPrefix(q["query"].(string), "label_values("), ")"), ", ")
			require.True(t, ok, v.Name)
			queries = append(queries, query{"variable " + v.Name, fmt.Sprintf(`%s{%s!=""}`, metric, label)})
		}
	}
	return queries
}

func alerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	raw, err := os.ReadFile(files + "rules.yaml")
	require.NoError(t, err)
	groups, errs := rulefmt.Parse(raw, false, model.UTF8Validation)
	require.Empty(t, errs)
	require.Len(t, groups.Groups, 1)
	return groups.Groups[0].Rules
}

// exposed returns the names of series of which a metric consists, with the labels of each.
func exposed(metrics map[string][]string) map[string][]string {
	all := map[string][]string{}
	for name, names := range metrics {
		names = slices.Concat(names, targetLabels)
		if !isHistogram(name) {
			all[name] = names
			continue
		}
		all[name+"_bucket"], all[name+"_count"], all[name+"_sum"] = append(slices.Clone(names), "le"), names, names
	}
	return all
}

func isHistogram(name string) bool {
	return strings.HasSuffix(name, "_seconds") && !strings.HasSuffix(name, "_timestamp_seconds")
}

// selectors returns what a query selects.
func selectors(t *testing.T, q query) (found []*parser.VectorSelector) {
	t.Helper()
	expr, err := parser.ParseExpr(q.expr)
	require.NoError(t, err, q.where)
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		if s, ok := node.(*parser.VectorSelector); ok {
			found = append(found, s)
		}
		return nil
	})
	return found
}

// Each query asks for metrics, labels and values of labels that there are, and gives an answer over them.
func TestQueries(t *testing.T) {
	there := exposed(metrics(t))
	reference, err := os.ReadFile(root + "/Documentation/reference.md")
	require.NoError(t, err)
	queries := dashboard(t)
	panels := len(queries)
	for _, rule := range alerts(t) {
		queries = append(queries, query{"alert " + rule.Alert, rule.Expr})
	}
	values := map[string]map[string][]string{} // of labels, by metric
	for _, q := range queries {
		for _, s := range selectors(t, q) {
			require.Contains(t, there, s.Name, "%s: there is no such metric", q.where)
			for _, m := range s.LabelMatchers {
				if m.Name == labels.MetricName {
					continue
				}
				require.Contains(t, there[s.Name], m.Name, "%s: %s has no such label", q.where, s.Name)
				if m.Value == ".*" || m.Value == "" {
					continue
				}
				require.Contains(t, explanation(t, string(reference), s.Name), m.Value, "%s: %s has no such value of %s", q.where, s.Name, m.Name)
				if m.Type == labels.MatchEqual {
					if values[s.Name] == nil {
						values[s.Name] = map[string][]string{}
					}
					values[s.Name][m.Name] = append(values[s.Name][m.Name], m.Value)
				}
			}
		}
	}
	var data []*series
	for name, names := range there {
		for _, set := range combinations(names, values[name]) {
			s := newSeries(name, set, func(minute float64) float64 { return 1 + 60*minute })
			if !strings.HasSuffix(name, "_total") && !strings.HasSuffix(name, "_count") && !strings.HasSuffix(name, "_bucket") {
				s.at = func(float64) float64 { return 1 }
			}
			data = append(data, s)
		}
	}
	for i, q := range queries {
		matrix := evaluate(t, q, data)
		if i < panels {
			require.NotEmpty(t, matrix, "%s: %s", q.where, q.expr)
		}
	}
}

// explanation returns the row of a metric in the reference.
func explanation(t *testing.T, page, series string) string {
	t.Helper()
	name := strings.TrimPrefix(series, prefix)
	for _, suffix := range []string{"", "_bucket", "_count", "_sum"} {
		for line := range strings.Lines(page) {
			if short, ok := strings.CutSuffix(name, suffix); ok && strings.HasPrefix(line, "|") && strings.Contains(line, "`"+short+"`") {
				return line
			}
		}
	}
	require.Fail(t, "reference.md has no "+name)
	return ""
}

// combinations returns sets of labels with each of the values, and another one, for those names that have some.
func combinations(names []string, values map[string][]string) []map[string]string {
	sets := []map[string]string{{}}
	for _, name := range names {
		choices := append(slices.Compact(slices.Sorted(slices.Values(values[name]))), "x")
		if name == "le" {
			choices = []string{"0.1", "1", "+Inf"}
		}
		var next []map[string]string
		for _, set := range sets {
			for _, choice := range choices {
				more := maps.Clone(set)
				more[name] = choice
				next = append(next, more)
			}
		}
		sets = next
	}
	return sets
}

// Each alert is quiet while all is well, and fires when what it is about has lasted for its time.
func TestAlerts(t *testing.T) {
	there := exposed(metrics(t))
	constant := func(name string, value float64, pairs ...string) *series {
		set := map[string]string{"node": "n", "job": "j"}
		for i := 0; i < len(pairs); i += 2 {
			set[pairs[i]] = pairs[i+1]
		}
		return newSeries(prefix+name, set, func(float64) float64 { return value })
	}
	growing := func(name string, perMinute float64, pairs ...string) *series {
		s := constant(name, 0, pairs...)
		s.at = func(minute float64) float64 { return perMinute * minute }
		return s
	}
	prepared := func(slow float64) []*series {
		const name = "claim_operation_duration_seconds_bucket"
		return []*series{
			growing(name, 10-slow, "operation", "prepare", "stage", "none", "le", "4"),
			growing(name, 10, "operation", "prepare", "stage", "none", "le", "64"),
			growing(name, 10, "operation", "prepare", "stage", "none", "le", "+Inf"),
		}
	}
	addresses := func(used, free float64) []*series {
		const name = "operator_network_addresses"
		return []*series{
			constant(name, used, "network", "a", "family", "ipv4", "state", "used"), constant(name, free, "network", "a", "family", "ipv4", "state", "free"),
			constant(name, 1, "network", "a", "family", "ipv6", "state", "used"), constant(name, 9e18, "network", "a", "family", "ipv6", "state", "free"),
		}
	}
	pool := func(free float64) []*series {
		return []*series{constant("pool_devices", 7, "pool", "p", "state", "offered"), constant("pool_devices", free, "pool", "p", "state", "free"),
			constant("pool_devices", 0, "pool", "empty", "state", "offered"), constant("pool_devices", 0, "pool", "empty", "state", "free")}
	}
	gauge := func(name string, well, ill float64, pairs ...string) [2][]*series {
		return [2][]*series{{constant(name, well, pairs...)}, {constant(name, ill, pairs...)}}
	}
	counter := func(name string, well, ill float64, pairs ...string) [2][]*series {
		return [2][]*series{{growing(name, well, pairs...)}, {growing(name, ill, pairs...)}}
	}
	states := map[string][2][]*series{ // well and ill
		"NetworkDriverDeviceFailed":         gauge("allocations", 0, 1, "state", "Failed"),
		"NetworkDriverDeviceUnhealthy":      gauge("unhealthy_devices", 0, 1, "cause", "CarrierLost"),
		"NetworkDriverDeviceQuarantined":    gauge("quarantined_devices", 0, 1),
		"NetworkDriverPublicationStale":     gauge("publication_failing", 0, 1),
		"NetworkDriverNotRegistered":        gauge("registered", 1, 0),
		"NetworkDriverRuntimeAway":          gauge("nri_connected", 1, 0),
		"NetworkDriverLastConfig":           gauge("last_config", 0, 1),
		"NetworkDriverPrepareSlow":          {prepared(0.5), prepared(3)},
		"NetworkDriverPrepareFails":         counter("claim_operations_total", 0.1, 1, "operation", "prepare", "result", "error"),
		"NetworkDriverMovesFail":            counter("moves_total", 0.1, 1, "operation", "attach", "result", "failure"),
		"NetworkDriverPoolConflict":         gauge("pool_conflicts", 0, 1),
		"NetworkDriverPoolFull":             {pool(1), pool(0)},
		"NetworkDriverNetworkNearlyFull":    {addresses(200, 54), addresses(250, 4)},
		"NetworkDriverClusterConfigRefused": gauge("operator_cluster_configs", 0, 1, "state", "conflict"),
		"NetworkDriverNoLeader":             gauge("operator_leader", 1, 0),
		"NetworkDriverAPIRetries":           counter("api_requests_total", 6, 120, "method", "GET", "result", "retry"),
	}
	troubleshoot, err := os.ReadFile(root + "/Documentation/troubleshoot.md")
	require.NoError(t, err)
	rules := alerts(t)
	require.Len(t, rules, len(states))
	for _, rule := range rules {
		t.Run(rule.Alert, func(t *testing.T) {
			state, ok := states[rule.Alert]
			require.True(t, ok)
			for _, s := range slices.Concat(state[0], state[1]) {
				require.Contains(t, there, s.labels.Get(labels.MetricName))
			}
			q := query{rule.Alert, rule.Expr}
			require.Empty(t, evaluate(t, q, state[0]), "all is well")
			matrix := evaluate(t, q, state[1])
			require.Len(t, matrix, 1)
			last := matrix[0].Floats
			require.GreaterOrEqual(t, time.Duration(last[len(last)-1].T-last[0].T)*time.Millisecond, time.Duration(rule.For))
			require.Len(t, last, int((last[len(last)-1].T-last[0].T)/step.Milliseconds())+1, "without a gap")

			url, anchor, _ := strings.Cut(rule.Annotations["runbook_url"], "#")
			require.True(t, strings.HasSuffix(url, "/Documentation/troubleshoot.md"))
			require.Equal(t, strings.ToLower(rule.Alert), anchor)
			require.Contains(t, string(troubleshoot), "\n### "+rule.Alert+"\n")
			for _, label := range regexp.MustCompile(`\$labels\.(\w+)`).FindAllStringSubmatch(rule.Annotations["summary"], -1) {
				require.NotEmpty(t, matrix[0].Metric.Get(label[1]), "%s is in the summary", label[1])
			}
		})
	}
}

var metricName = regexp.MustCompile(prefix + `\w+`)

// Each metric that a page names in full is there.
func TestMetricsOnPages(t *testing.T) {
	there := exposed(metrics(t))
	pages, err := filepath.Glob(root + "/Documentation/*.md")
	require.NoError(t, err)
	found := 0
	for _, page := range append(pages, root+"/README.md") {
		raw, err := os.ReadFile(page)
		require.NoError(t, err)
		for _, name := range metricName.FindAllString(string(raw), -1) {
			if name == prefix || name == prefix+"operator_" {
				continue
			}
			found++
			require.Contains(t, there, name, filepath.Base(page))
		}
	}
	require.NotZero(t, found)
}

// evaluate has Prometheus' engine evaluate the query at each scrape.
func evaluate(t *testing.T, q query, data []*series) promql.Matrix {
	t.Helper()
	engine := promql.NewEngine(promql.EngineOpts{MaxSamples: 50_000_000, Timeout: time.Minute, LookbackDelta: 5 * time.Minute})
	t.Cleanup(func() { _ = engine.Close() })
	start := time.Unix(1_000_000, 0)
	queryable := &storage.MockQueryable{MockQuerier: &storage.MockQuerier{
		SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
			return selected(data, start, matchers)
		},
	}}
	query, err := engine.NewRangeQuery(t.Context(), queryable, nil, q.expr, start, start.Add(length), step)
	require.NoError(t, err, "%s: %s", q.where, q.expr)
	defer query.Close()
	result := query.Exec(t.Context())
	require.NoError(t, result.Err, "%s: %s", q.where, q.expr)
	require.Empty(t, result.Warnings.AsErrors(), "%s: %s", q.where, q.expr)
	matrix, err := result.Matrix()
	require.NoError(t, err)
	copied := slices.Clone(matrix)
	for i := range copied {
		copied[i].Floats = slices.Clone(copied[i].Floats)
	}
	return copied
}

// series is one whose value is a function of the time.
type series struct {
	labels labels.Labels
	at     func(minute float64) float64
}

func newSeries(name string, set map[string]string, at func(minute float64) float64) *series {
	set = maps.Clone(set)
	set[labels.MetricName] = name
	return &series{labels.FromMap(set), at}
}

func selected(data []*series, start time.Time, matchers []*labels.Matcher) storage.SeriesSet {
	set := &seriesSet{next: -1}
next:
	for _, s := range data {
		for _, m := range matchers {
			if !m.Matches(s.labels.Get(m.Name)) {
				continue next
			}
		}
		var samples []chunks.Sample
		for at := time.Duration(0); at <= length; at += step {
			samples = append(samples, sample{start.Add(at).UnixMilli(), s.at(at.Minutes())})
		}
		set.series = append(set.series, storage.NewListSeries(s.labels, samples))
	}
	return set
}

type seriesSet struct {
	series []storage.Series
	next   int
}

func (s *seriesSet) Next() bool                        { s.next++; return s.next < len(s.series) }
func (s *seriesSet) At() storage.Series                { return s.series[s.next] }
func (s *seriesSet) Err() error                        { return nil }
func (s *seriesSet) Warnings() annotations.Annotations { return nil }

type sample struct {
	t int64
	f float64
}

func (s sample) T() int64                      { return s.t }
func (s sample) F() float64                    { return s.f }
func (s sample) H() *histogram.Histogram       { return nil }
func (s sample) FH() *histogram.FloatHistogram { return nil }
func (s sample) Type() chunkenc.ValueType      { return chunkenc.ValFloat }
func (s sample) Copy() chunks.Sample           { return s }
