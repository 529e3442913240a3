// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/cilium/networkdriver/test/deploy"
	"github.com/cilium/networkdriver/test/lab"
)

// metricsAddress is where the agent's metrics are.
const metricsAddress = "127.0.0.1:9962"

// manyClaims has pods with several claims each start at the same time, on a node with a dummy for each.
func manyClaims(pods, each int) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		count := pods*each + dummyCount
		if err := b.dummies(ctx, count); err != nil {
			return err
		}
		b.fault()
		var names []string
		for i := range pods {
			name := fmt.Sprintf("many-%d", i)
			if err := b.createWith(ctx, name, each); err != nil {
				return err
			}
			names = append(names, name)
		}
		limited, cancel := context.WithTimeout(ctx, 15*time.Minute)
		defer cancel()
		var err error
		for range 5 { // as long as eventually's patience each
			if err = b.ready(limited, names...); err == nil {
				break
			}
		}
		if err != nil {
			return err
		}
		b.recovered()
		b.notes = append(b.notes, fmt.Sprintf("%d pods with %d claims each: all Running after %.0f s", pods, each, b.took.Seconds()))
		var deleteErr error
		for range 3 {
			if deleteErr = b.delete(ctx, 1, names...); deleteErr == nil {
				break
			}
		}
		return errors.Join(deleteErr, b.dummies(ctx, dummyCount))
	}
}

// dummies has the node offer so many dummies.
func (b *bench) dummies(ctx context.Context, count int) error {
	patch := fmt.Sprintf(`{"spec":{"deviceManagerConfigs":{"dummy":{"count":%d}}}}`, count)
	if _, err := b.Dynamic.Resource(nodeConfigs).Patch(ctx, b.node.Name(), "application/merge-patch+json", []byte(patch), metav1.PatchOptions{}); err != nil {
		return err
	}
	return b.eventually(ctx, "dummies", func(ctx context.Context) string {
		s, err := b.reader.Read(ctx)
		if err != nil {
			return err.Error()
		}
		if n := len(s.Slices[b.node.Name()+"/fast-net"]); n != count {
			return fmt.Sprintf("%d are offered, want %d", n, count)
		}
		return ""
	})
}

// createWith makes a pod with several claims of a dummy each.
func (b *bench) createWith(ctx context.Context, name string, claims int) error {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.PodSpec{
		NodeSelector:                  map[string]string{corev1.LabelHostname: b.node.Name()},
		TerminationGracePeriodSeconds: ptr.To[int64](1),
		Containers: []corev1.Container{{Name: "app", Image: lab.TestImage, ImagePullPolicy: corev1.PullIfNotPresent,
			Command: []string{"sleep", "1000000"}}},
	}}
	for i := range claims {
		claim := fmt.Sprintf("net%d", i)
		pod.Spec.ResourceClaims = append(pod.Spec.ResourceClaims, corev1.PodResourceClaim{Name: claim, ResourceClaimTemplateName: ptr.To("unnamed")})
		pod.Spec.Containers[0].Resources.Claims = append(pod.Spec.Containers[0].Resources.Claims, corev1.ResourceClaim{Name: claim})
	}
	_, err := b.Client.CoreV1().Pods(b.ns).Create(ctx, pod, metav1.CreateOptions{})
	return err
}

// holdConnections holds connections to the metrics' port and to the sockets of the agent for a minute and a half.
const holdConnections = `cat >/run/faults-idle.pl <<'END'
use IO::Socket::INET; use IO::Socket::UNIX; my @held; my $many = shift;
for my $to (@ARGV) { for (1..$many) {
  push @held, $to =~ m{^/} ? IO::Socket::UNIX->new(Peer => $to) : IO::Socket::INET->new(PeerAddr => $to);
} }
sleep 90;
END
perl /run/faults-idle.pl %[2]d %[1]s /run/cilium/*.sock /var/lib/kubelet/plugins/*/*.sock >/dev/null 2>&1 & sleep 3; rm /run/faults-idle.pl`

// idleConnections holds connections to every port and socket of the agent that say nothing, while pods start and end.
func idleConnections(count int) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		if _, err := b.node.Run(ctx, fmt.Sprintf(holdConnections, metricsAddress, count)); err != nil {
			return err
		}
		b.fault()
		names, err := b.started(ctx, twoPods...)
		if err != nil {
			return err
		}
		if _, err := b.figures(ctx); err != nil {
			return fmt.Errorf("metrics beside idle connections: %w", err)
		}
		b.recovered()
		return b.delete(ctx, 1, names...)
	}
}

// figures are what the agent uses.
type figures struct{ memory, goroutines, descriptors, netlink int }

func (f figures) String() string {
	return fmt.Sprintf("%d MiB of memory, %d goroutines, %d descriptors, %d netlink sockets", f.memory>>20, f.goroutines, f.descriptors, f.netlink)
}

var metric = regexp.MustCompile(`(?m)^(process_resident_memory_bytes|go_goroutines|process_open_fds) (\S+)$`)

// metrics returns what the agent's metrics say.
func (b *bench) metrics(ctx context.Context) (string, error) {
	return b.node.Run(ctx, fmt.Sprintf(`bash -c 'exec 3<>/dev/tcp/%s && printf "GET /metrics HTTP/1.0\r\n\r\n" >&3 && cat <&3'`, strings.ReplaceAll(metricsAddress, ":", "/")))
}

// figures asks the agent and the kernel.
func (b *bench) figures(ctx context.Context) (figures, error) {
	state, err := b.node.Process(ctx, deploy.Agent)
	if err != nil {
		return figures{}, err
	}
	out, err := b.metrics(ctx)
	if err != nil {
		return figures{}, err
	}
	sockets, err := b.node.Run(ctx, fmt.Sprintf("for fd in /proc/%d/fd/*; do readlink $fd; done | sort >/tmp/fds; awk 'NR > 1 {print \"socket:[\" $10 \"]\"}' /proc/net/netlink | sort | comm -12 - /tmp/fds | wc -l", state.PID))
	if err != nil {
		return figures{}, err
	}
	var f figures
	for _, m := range metric.FindAllStringSubmatch(out, -1) {
		v, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return figures{}, err
		}
		switch m[1] {
		case "process_resident_memory_bytes":
			f.memory = int(v)
		case "go_goroutines":
			f.goroutines = int(v)
		case "process_open_fds":
			f.descriptors = int(v)
		}
	}
	if f.netlink, err = strconv.Atoi(sockets); err != nil {
		return figures{}, err
	}
	if f.goroutines == 0 || f.memory == 0 || f.descriptors == 0 {
		return figures{}, fmt.Errorf("no figures in %.500q", out)
	}
	return f, nil
}

// life is a pod of the churn.
type life struct {
	of           *lane
	made, ends   time.Time
	ran, deleted bool
}

// lane is a kind of device on a node, as many pods of which live at a time as there are devices.
type lane struct {
	*bench
	template string
	free     int
}

// churn has pods come and go with random lifetimes, as many at a time as there are devices; some are deleted by force. In
// the first half the agent is killed now and then, and the runtime once; in the second what the agent uses must not grow.
func churn(vfs, dummies int) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		return b.churn(ctx, &churning{ // one of each is a pod's that stays
			benches: []*bench{b}, lanes: []*lane{{b, "vf", vfCount - 1}, {b, "dummy", dummyCount - 1}},
			left: map[string]int{"vf": vfs, "dummy": dummies},
		})
	}
}

// addressChurn is a churn on two nodes whose pods have addresses, none of which may be in two pods at any time.
func addressChurn(vfs, dummies int) func(context.Context, *bench, int) error {
	return func(ctx context.Context, b *bench, _ int) error {
		c := &churning{benches: []*bench{b, b.beside}, left: map[string]int{netVF: vfs, netDummy: dummies}}
		for _, b := range c.benches {
			c.lanes = append(c.lanes, &lane{b, netVF, vfCount - 1}, &lane{b, netDummy, dummyCount - 1})
		}
		watch := newAddressWatch(c.benches...)
		watching, stop := context.WithCancel(ctx)
		var watchErr error
		var wg sync.WaitGroup
		wg.Go(func() {
			for watchErr == nil && watching.Err() == nil {
				watchErr = watch.look(watching)
			}
		})
		err := b.churn(ctx, c)
		stop()
		wg.Wait()
		if errors.Is(watchErr, context.Canceled) {
			watchErr = nil
		}
		b.notes = append(b.notes, fmt.Sprintf("%d looks at the addresses in pods, up to %d at one time, %d different ones", watch.looks, watch.most, len(watch.spans)))
		return errors.Join(err, watchErr, watch.verdict())
	}
}

// churn has the pods come and go, and reports what it saw.
func (b *bench) churn(ctx context.Context, c *churning) error {
	c.lives = map[string]*life{}
	c.halfway = make([]figures, len(c.benches))
	for _, count := range c.left {
		c.all += count
	}
	b.fault()
	if err := c.run(ctx); err != nil {
		return err
	}
	for _, b := range c.benches {
		if err := b.restored(ctx); err != nil {
			return err
		}
	}
	b.recovered()
	slices.Sort(c.starts)
	at := func(p int) float64 { return c.starts[min(len(c.starts)-1, len(c.starts)*p/100)].Seconds() }
	b.notes = append(b.notes, fmt.Sprintf("%d pods, %d deleted by force, %d kills of agents, one of containerd", c.all, c.forced, c.kills),
		fmt.Sprintf("pod start p50 %.1f s, p99 %.1f s", at(50), at(99)))
	var errs []error
	for i, churned := range c.benches {
		end, err := churned.figures(ctx)
		if err != nil {
			return err
		}
		moves, err := churned.durations(ctx)
		if err != nil {
			return err
		}
		b.notes = append(b.notes, fmt.Sprintf("%s: %s", churned.node.Name(), moves),
			fmt.Sprintf("%s: the agent half-way: %s; at the end: %s", churned.node.Name(), c.halfway[i], end))
		errs = append(errs, end.grown(c.halfway[i]))
	}
	return errors.Join(errs...)
}

// churning is a churn that goes on.
type churning struct {
	benches       []*bench
	lanes         []*lane
	left          map[string]int // pods to make, by template
	lives         map[string]*life
	starts        []time.Duration
	halfway       []figures // of each bench
	ended         time.Time // when the last pod did
	runtimeKilled bool

	all, done, forced, kills int
}

const maxKills = 5

func (c *churning) run(ctx context.Context) error {
	for c.ended = time.Now(); c.done < c.all; time.Sleep(poll) {
		if err := c.fill(ctx); err != nil {
			return err
		}
		for _, b := range c.benches {
			if err := c.step(ctx, b); err != nil {
				return err
			}
		}
		if err := c.disturb(ctx); err != nil {
			return err
		}
		if time.Since(c.ended) > patience {
			return fmt.Errorf("no pod has ended for %v; there are %v", patience, slices.Sorted(maps.Keys(c.lives)))
		}
	}
	return nil
}

// fill makes pods for the devices that are free.
func (c *churning) fill(ctx context.Context) error {
	for _, l := range c.lanes {
		for c.left[l.template] > 0 && l.free > 0 {
			c.left[l.template]--
			l.free--
			names, err := l.createAll(ctx, kind{template: l.template, vlan: vlans[l.rand.IntN(3)], shape: shapes[l.rand.IntN(3)]})
			if err != nil {
				return err
			}
			lasts := time.Duration(500+l.rand.IntN(12000)) * time.Millisecond
			c.lives[l.ns+"/"+names[0]] = &life{of: l, made: time.Now(), ends: time.Now().Add(lasts)}
		}
	}
	return nil
}

// step looks at the pods of a bench, and deletes those whose time is over: half of them by force.
func (c *churning) step(ctx context.Context, b *bench) error {
	list, err := b.Client.CoreV1().Pods(b.ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	there := map[string]corev1.Pod{}
	for _, p := range list.Items {
		there[b.ns+"/"+p.Name] = p
	}
	for name, l := range c.lives {
		if l.of.bench != b {
			continue
		}
		p, ok := there[name]
		if !ok && !l.deleted {
			return fmt.Errorf("pod %s is gone and nobody has deleted it", name)
		}
		if !ok {
			delete(c.lives, name)
			l.of.free++
			c.done++
			c.ended = time.Now()
			continue
		}
		if p.Status.Phase == corev1.PodRunning && !l.ran {
			l.ran = true
			c.starts = append(c.starts, time.Since(l.made))
		}
		if !l.deleted && time.Now().After(l.ends) {
			l.deleted = true
			grace := b.rand.Int64N(2)
			if grace == 0 {
				c.forced++
			}
			if err := b.deleteNow(ctx, grace, p.Name); err != nil {
				return err
			}
		}
	}
	return nil
}

// disturb kills agents, one after the other, and the runtime, by pods that are done, so that it is as often in a slow run.
func (c *churning) disturb(ctx context.Context) error {
	switch {
	case c.kills < maxKills && c.done >= (c.kills+1)*c.all/(2*(maxKills+1)):
		b := c.benches[c.kills%len(c.benches)]
		c.kills++
		if err := b.killAgent(ctx); err != nil {
			return err
		}
		time.Sleep(time.Duration(b.rand.IntN(3000)) * time.Millisecond)
		return b.StartAgent(ctx, b.node)
	case !c.runtimeKilled && c.done >= c.all/4:
		c.runtimeKilled = true
		return c.benches[0].killContainerd(ctx)
	case c.halfway[0].memory == 0 && c.done >= c.all*6/10:
		for i, b := range c.benches {
			var err error
			if c.halfway[i], err = b.figures(ctx); err != nil {
				return err
			}
		}
	}
	return nil
}

// grown is an error if the agent uses more than it did.
func (f figures) grown(before figures) error {
	const some = 10 // of connections and requests that happen to be there
	if f.goroutines > before.goroutines+2*some || f.descriptors > before.descriptors+some || f.netlink > before.netlink+some ||
		f.memory > before.memory*3/2 {
		return fmt.Errorf("the agent uses more than before: %s, was %s", f, before)
	}
	return nil
}

var bucket = regexp.MustCompile(`(?m)^cilium_networkdriver_(move|claim_operation)_duration_seconds_bucket\{.*(?:move|operation)="(\w+)".*le="([^"]+)"\} (\d+)$`)

// durations are the times that attach, detach and Unprepare took since the agent's start, as the upper bounds of buckets.
func (b *bench) durations(ctx context.Context) (string, error) {
	out, err := b.metrics(ctx)
	if err != nil {
		return "", err
	}
	type point struct {
		le    string
		count int
	}
	series := map[string][]point{}
	for _, m := range bucket.FindAllStringSubmatch(out, -1) {
		n, err := strconv.Atoi(m[4])
		if err != nil {
			return "", err
		}
		series[m[2]] = append(series[m[2]], point{m[3], n})
	}
	var texts []string
	for _, what := range []string{"attach", "detach", "unprepare"} {
		points := series[what]
		if len(points) == 0 {
			return "", fmt.Errorf("the metrics have no durations of %s", what)
		}
		total := points[len(points)-1].count
		at := func(p int) string {
			for _, point := range points {
				if point.count*100 >= total*p {
					return point.le
				}
			}
			return "+Inf"
		}
		texts = append(texts, fmt.Sprintf("%s p50 within %s s, p99 within %s s (%d)", what, at(50), at(99), total))
	}
	return strings.Join(texts, "; "), nil
}
