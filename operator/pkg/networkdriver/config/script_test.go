// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package config

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cilium/hive/script"
	"github.com/cilium/hive/script/scripttest"
	"github.com/cilium/statedb"
	eventsv1 "k8s.io/api/events/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/cilium/networkdriver/api/crds"
	"github.com/cilium/networkdriver/api/v2alpha1"
	"github.com/cilium/networkdriver/pkg/pause"
)

// TestAPIScripts runs the scripts, each on empty resources of one API server.
func TestAPIScripts(t *testing.T) {
	t.Parallel()
	c := startCluster(t)
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	newEngine := func(tb testing.TB, _ []string) *script.Engine {
		if err := c.installCRDs(ctx); err != nil {
			tb.Fatal(err)
		}
		c.clear(tb)
		s := &scripted{cluster: c, tb: tb, replicas: map[string]*replica{}}
		tb.Cleanup(s.stopAll)
		cmds := script.DefaultCmds()
		maps.Copy(cmds, s.commands())
		cmds["until"] = until(cmds)
		return &script.Engine{Cmds: cmds, Conds: map[string]script.Cond{}, RetryInterval: 20 * time.Millisecond, MaxRetryInterval: 100 * time.Millisecond}
	}
	scripttest.Test(t, ctx, newEngine, nil, "testdata/*.txtar", scripttest.NoParallel)
}

// scripted has the commands of one script.
type scripted struct {
	*cluster
	tb       testing.TB
	replicas map[string]*replica
	// newest is the creation time of the newest cluster config.
	newest time.Time
}

func (s *scripted) stopAll() {
	for name, r := range s.replicas {
		if err := r.stop(); err != nil {
			s.tb.Errorf("stop operator %s: %v", name, err)
		}
		if s.tb.Failed() {
			s.tb.Logf("log of operator %s:\n%s", name, r.log)
		}
	}
}

func (s *scripted) commands() map[string]script.Cmd {
	command := func(summary, args string, n int, run func(state *script.State, args []string) (string, error)) script.Cmd {
		return script.Command(script.CmdUsage{Summary: summary, Args: args}, func(state *script.State, args ...string) (script.WaitFunc, error) {
			if len(args) < n {
				return nil, script.ErrUsage
			}
			out, err := run(state, args)
			return func(*script.State) (string, string, error) { return out, "", err }, nil
		})
	}
	return map[string]script.Cmd{
		"operator":       command("Start an operator and wait until it is ready, or stop it", "start|start-unready|stop [name] [refresh]", 1, s.operator),
		"crds":           command("Install the definitions, install an older one of cluster configs that lets every selector pass, or delete all or some", "install|older|delete [node|nodeconfig|cluster...]", 1, s.definitions),
		"node":           command("Make a CiliumNode or set its labels", "name [key=value]...", 1, s.node),
		"apply":          command("Create or replace objects, each cluster config in a later second than those before", "file...", 1, s.apply),
		"apply-together": command("Create cluster configs in the same second", "file...", 2, s.applyTogether),
		"delete":         command("Delete objects", "node|cluster|nodeconfig name...", 2, s.delete),
		"patch":          command("Apply a JSON merge patch", "node|cluster|nodeconfig name patch", 3, s.patch),
		"clusters":       command("Print the cluster configs' status: name, ready, reason, conflict, configured/matched nodes", "", 0, s.clusters),
		"message":        command("Print a condition's message", "cluster type", 2, s.message),
		"nodeconfigs":    command("Print the node configs: name, cluster config, number of dummies", "", 0, s.nodeConfigs),
		"spec":           command("Print a spec, of a cluster config that for nodes", "cluster|nodeconfig name", 2, s.spec),
		"metadata":       command("Print the labels and annotations of a node config", "name", 1, s.metadata),
		"events":         command("Print object, type and reason of the events about cluster configs and node configs, each once", "", 0, s.events),
		"event-count":    command("Print how many events there are with a reason", "reason", 1, s.eventCount),
		"writes":         command("Print the operator's writes since its start or reset", "[name]", 0, s.writes),
		"reads":          command("Print how often the operator has read a single node config", "[name]", 0, s.reads),
		"reset":          command("Count writes anew", "[name]", 0, s.reset),
		"withhold":       command("Withhold the watch events of node configs from the operator", "on|off", 1, s.withhold),
		"table":          command("Print a table of the operator", "name", 1, s.table),
		"logged":         command("Print how many of the operator's log lines have all the parts", "part...", 1, s.logged),
		"ready":          command("Print why the operator is not ready", "", 0, s.ready),
	}
}

// patience is how long a script waits for what should be there soon.
const patience = 30 * time.Second

// until returns a command that runs another one until that prints what is expected.
func until(cmds map[string]script.Cmd) script.Cmd {
	return script.Command(script.CmdUsage{Summary: "Run a command until it prints what is in the file", Args: "file|empty command [args...]"},
		func(state *script.State, args ...string) (script.WaitFunc, error) {
			if len(args) < 2 || cmds[args[1]] == nil {
				return nil, script.ErrUsage
			}
			want := ""
			if args[0] != "empty" {
				data, err := os.ReadFile(state.Path(args[0]))
				if err != nil {
					return nil, err
				}
				want = string(data)
			}
			for start := time.Now(); ; {
				wait, err := cmds[args[1]].Run(state, args[2:]...)
				if err != nil {
					return nil, err
				}
				got, _, err := wait(state)
				if err == nil && got == want {
					return func(*script.State) (string, string, error) { return got, "", nil }, nil
				}
				if time.Since(start) > patience || !pause.For(state.Context(), 10*time.Millisecond) {
					return nil, fmt.Errorf("%v: error %v, printed\n%s\nwanted\n%s", args[1:], err, got, want)
				}
			}
		})
}

func name(args []string) string {
	if len(args) > 0 {
		return args[0]
	}
	return "a"
}

func (s *scripted) operator(state *script.State, args []string) (string, error) {
	who := name(args[1:])
	if args[0] == "stop" {
		r := s.replicas[who]
		delete(s.replicas, who)
		return "", r.stop()
	}
	r, err := s.startReplica(s.tb, func(c *Config) {
		if len(args) > 2 {
			c.NetworkDriverRefreshInterval, _ = time.ParseDuration(args[2])
		}
	})
	if err != nil {
		return "", err
	}
	s.replicas[who] = r
	for args[0] == "start" && !r.checks.Status().Ready {
		if !pause.For(state.Context(), 10*time.Millisecond) {
			return "", errors.New(r.log.String())
		}
	}
	return "", nil
}

func (s *scripted) definitions(state *script.State, args []string) (string, error) {
	switch args[0] {
	case "install":
		return "", errors.Join(s.replaceDefinition(state.Context(), false), s.installCRDs(state.Context()))
	case "older":
		return "", s.replaceDefinition(state.Context(), true)
	}
	which := []schema.GroupVersionResource{nodeResource, nodeConfigResource, clusterConfigResource}
	if len(args) > 1 {
		which = nil
		for _, name := range args[1:] {
			which = append(which, resources[name])
		}
	}
	for _, resource := range which {
		err := s.crds.CustomResourceDefinitions().Delete(state.Context(), resource.GroupResource().String(), metav1.DeleteOptions{})
		if err != nil {
			return "", err
		}
		for {
			_, err := s.dynamic.Resource(resource).List(state.Context(), metav1.ListOptions{})
			if apierrors.IsNotFound(err) {
				break
			}
			if !pause.For(state.Context(), 20*time.Millisecond) {
				return "", err
			}
		}
	}
	return "", nil
}

// replaceDefinition replaces the definition of cluster configs, if there is one, and returns when it is in effect.
func (s *scripted) replaceDefinition(ctx context.Context, older bool) error {
	definitions := s.crds.CustomResourceDefinitions()
	object, err := definitions.Get(ctx, clusterConfigResource.GroupResource().String(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, definition := range crds.Objects() {
		if definition.Name == object.Name {
			object.Spec.Versions = definition.Spec.Versions
		}
	}
	if older {
		keep := true
		object.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties["spec"].Properties["nodeSelector"] =
			apiextensionsv1.JSONSchemaProps{Type: "object", XPreserveUnknownFields: &keep}
	}
	if _, err := definitions.Update(ctx, object, metav1.UpdateOptions{}); err != nil {
		return err
	}
	for {
		_, err := s.dynamic.Resource(clusterConfigResource).Create(ctx, &unstructured.Unstructured{Object: map[string]any{
			"apiVersion": v2alpha1.SchemeGroupVersion.String(), "kind": v2alpha1.ClusterConfigKind, "metadata": map[string]any{"name": "x"},
			"spec": map[string]any{"nodeSelector": map[string]any{"matchExpressions": []any{map[string]any{"key": "a", "operator": "?"}}}, "spec": map[string]any{}},
		}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if older == (err == nil) && (err == nil || apierrors.IsInvalid(err)) {
			return nil
		}
		if !pause.For(ctx, 20*time.Millisecond) {
			return err
		}
	}
}

func (s *scripted) node(state *script.State, args []string) (string, error) {
	labels := map[string]any{}
	for _, arg := range args[1:] {
		key, value, _ := strings.Cut(arg, "=")
		labels[key] = value
	}
	return "", s.put(state.Context(), nodeResource, &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": v2alpha1.CiliumNodeGroupVersion.String(), "kind": v2alpha1.CiliumNodeKind,
		"metadata": map[string]any{"name": args[0], "labels": labels}, "spec": map[string]any{},
	}})
}

// put creates or replaces an object.
func (s *scripted) put(ctx context.Context, resource schema.GroupVersionResource, object *unstructured.Unstructured) error {
	objects := s.dynamic.Resource(resource)
	existing, err := objects.Get(ctx, object.GetName(), metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		_, err = objects.Create(ctx, object, metav1.CreateOptions{})
		return err
	}
	if err != nil {
		return err
	}
	object.SetResourceVersion(existing.GetResourceVersion())
	_, err = objects.Update(ctx, object, metav1.UpdateOptions{})
	return err
}

var resources = map[string]schema.GroupVersionResource{
	"node": nodeResource, "nodeconfig": nodeConfigResource, "cluster": clusterConfigResource,
	v2alpha1.ClusterConfigKind: clusterConfigResource, v2alpha1.NodeConfigKind: nodeConfigResource,
}

func read(state *script.State, file string) (*unstructured.Unstructured, error) {
	data, err := os.ReadFile(state.Path(file))
	if err != nil {
		return nil, err
	}
	object := &unstructured.Unstructured{}
	return object, yaml.Unmarshal(data, &object.Object)
}

func (s *scripted) apply(state *script.State, args []string) (string, error) {
	for _, file := range args {
		object, err := read(state, file)
		if err != nil {
			return "", err
		}
		if object.GetKind() == v2alpha1.ClusterConfigKind {
			if err := s.later(state.Context(), object); err != nil {
				return "", err
			}
		}
		if err := s.put(state.Context(), resources[object.GetKind()], object); err != nil {
			return "", err
		}
	}
	return "", nil
}

// later returns when a new cluster config would be younger than the newest one.
func (s *scripted) later(ctx context.Context, object *unstructured.Unstructured) error {
	for {
		made, err := s.dynamic.Resource(clusterConfigResource).Create(ctx, object, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if apierrors.IsAlreadyExists(err) {
			return nil
		}
		if err != nil {
			return err
		}
		if t := made.GetCreationTimestamp().Time; t.After(s.newest) {
			s.newest = t
			return nil
		}
		if !pause.For(ctx, 20*time.Millisecond) {
			return ctx.Err()
		}
	}
}

func (s *scripted) applyTogether(state *script.State, args []string) (string, error) {
	for {
		seconds := map[time.Time]bool{}
		for _, file := range args {
			object, err := read(state, file)
			if err != nil {
				return "", err
			}
			made, err := s.dynamic.Resource(clusterConfigResource).Create(state.Context(), object, metav1.CreateOptions{})
			if err != nil {
				return "", err
			}
			seconds[made.GetCreationTimestamp().UTC()] = true
			s.newest = made.GetCreationTimestamp().Time
		}
		if len(seconds) == 1 {
			return "", nil
		}
		for _, file := range args {
			object, err := read(state, file)
			if err != nil {
				return "", err
			}
			if err := s.dynamic.Resource(clusterConfigResource).Delete(state.Context(), object.GetName(), metav1.DeleteOptions{}); err != nil {
				return "", err
			}
		}
	}
}

func (s *scripted) delete(state *script.State, args []string) (string, error) {
	for _, name := range args[1:] {
		if err := s.dynamic.Resource(resources[args[0]]).Delete(state.Context(), name, metav1.DeleteOptions{}); err != nil {
			return "", err
		}
	}
	return "", nil
}

func (s *scripted) patch(state *script.State, args []string) (string, error) {
	_, err := s.dynamic.Resource(resources[args[0]]).Patch(state.Context(), args[1], types.MergePatchType, []byte(args[2]), metav1.PatchOptions{})
	return "", err
}

// clusters prints a status only when it speaks of the newest generation.
func (s *scripted) clusters(state *script.State, _ []string) (string, error) {
	list, err := s.dynamic.Resource(clusterConfigResource).List(state.Context(), metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	out := ""
	for _, item := range list.Items {
		config, err := typed(item)
		if err != nil {
			return "", err
		}
		if config.Status.ObservedGeneration != config.Generation {
			out += config.Name + " not observed\n"
			continue
		}
		ready, conflict := metav1.Condition{}, metav1.Condition{}
		for _, c := range config.Status.Conditions {
			if c.ObservedGeneration != config.Generation {
				return "", fmt.Errorf("condition %s of %s speaks of generation %d", c.Type, config.Name, c.ObservedGeneration)
			}
			switch c.Type {
			case v2alpha1.ConditionReady:
				ready = c
			case v2alpha1.ConditionConflicting:
				conflict = c
			}
		}
		out += fmt.Sprintf("%s ready=%s/%s conflict=%s/%s %d/%d\n", config.Name, ready.Status, ready.Reason, conflict.Status, conflict.Reason,
			config.Status.ConfiguredNodes, config.Status.MatchedNodes)
	}
	return out, nil
}

func typed(item unstructured.Unstructured) (*v2alpha1.CiliumNetworkDriverClusterConfig, error) {
	data, err := item.MarshalJSON()
	if err != nil {
		return nil, err
	}
	config := &v2alpha1.CiliumNetworkDriverClusterConfig{}
	return config, json.Unmarshal(data, config)
}

func (s *scripted) message(state *script.State, args []string) (string, error) {
	item, err := s.dynamic.Resource(clusterConfigResource).Get(state.Context(), args[0], metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	config, err := typed(*item)
	if err != nil {
		return "", err
	}
	for _, c := range config.Status.Conditions {
		if c.Type == args[1] {
			return c.Message + "\n", nil
		}
	}
	return "", fmt.Errorf("no condition %s", args[1])
}

func (s *scripted) nodeConfigs(state *script.State, _ []string) (string, error) {
	list, err := s.dynamic.Resource(nodeConfigResource).List(state.Context(), metav1.ListOptions{})
	if err != nil {
		return "", err
	}
	out := ""
	for _, item := range list.Items {
		owner := "-"
		if item.GetLabels()[v2alpha1.LabelManagedBy] == v2alpha1.ManagedByOperator {
			owner = item.GetAnnotations()[v2alpha1.AnnotationClusterConfig]
		}
		count, _, _ := unstructured.NestedInt64(item.Object, "spec", "deviceManagerConfigs", "dummy", "count")
		out += fmt.Sprintf("%s %s %d\n", item.GetName(), owner, count)
	}
	return out, nil
}

func (s *scripted) spec(state *script.State, args []string) (string, error) {
	item, err := s.dynamic.Resource(resources[args[0]]).Get(state.Context(), args[1], metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	path := []string{"spec"}
	if args[0] == "cluster" {
		path = append(path, "spec")
	}
	spec, _, err := unstructured.NestedMap(item.Object, path...)
	if err != nil {
		return "", err
	}
	out, err := json.MarshalIndent(spec, "", "  ")
	return string(out) + "\n", err
}

func (s *scripted) metadata(state *script.State, args []string) (string, error) {
	item, err := s.dynamic.Resource(nodeConfigResource).Get(state.Context(), args[0], metav1.GetOptions{})
	if err != nil {
		return "", err
	}
	out := ""
	for _, m := range []map[string]string{item.GetLabels(), item.GetAnnotations()} {
		for _, key := range slices.Sorted(maps.Keys(m)) {
			out += key + "=" + m[key] + "\n"
		}
	}
	return out + fmt.Sprintf("owners=%d finalizers=%d\n", len(item.GetOwnerReferences()), len(item.GetFinalizers())), nil
}

func (s *scripted) events(state *script.State, _ []string) (string, error) {
	list, err := s.eventsOfPresent(state.Context())
	lines := map[string]bool{}
	for _, e := range list {
		lines[fmt.Sprintf("%s %s %s\n", e.Regarding.Name, e.Type, e.Reason)] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(lines)), ""), err
}

func (s *scripted) eventCount(state *script.State, args []string) (string, error) {
	list, err := s.eventsOfPresent(state.Context())
	list = slices.DeleteFunc(list, func(e eventsv1.Event) bool { return e.Reason != args[0] })
	return fmt.Sprintln(len(list)), err
}

// eventsOfPresent leaves out the events of earlier scripts, which are about objects that are gone.
func (s *scripted) eventsOfPresent(ctx context.Context) ([]eventsv1.Event, error) {
	list, err := s.client.EventsV1().Events(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	present := map[types.UID]bool{}
	for _, resource := range []schema.GroupVersionResource{clusterConfigResource, nodeConfigResource} {
		objects, err := s.dynamic.Resource(resource).List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		for _, object := range objects.Items {
			present[object.GetUID()] = true
		}
	}
	return slices.DeleteFunc(list.Items, func(e eventsv1.Event) bool { return !present[e.Regarding.UID] }), nil
}

func (s *scripted) writes(_ *script.State, args []string) (string, error) {
	return s.replicas[name(args)].traffic.writes(), nil
}

func (s *scripted) reads(_ *script.State, args []string) (string, error) {
	return fmt.Sprintln(s.replicas[name(args)].traffic.count("GET", v2alpha1.NodeConfigResource)), nil
}

func (s *scripted) reset(_ *script.State, args []string) (string, error) {
	s.replicas[name(args)].traffic.reset()
	return "", nil
}

func (s *scripted) withhold(_ *script.State, args []string) (string, error) {
	s.replicas["a"].traffic.withhold(args[0] == "on")
	return "", nil
}

func (s *scripted) table(_ *script.State, args []string) (string, error) {
	db := s.replicas["a"].db
	txn := db.ReadTxn()
	out := ""
	for row := range (statedb.AnyTable{Meta: db.GetTable(txn, args[0])}).All(txn) {
		out += strings.Join(row.(statedb.TableWritable).TableRow(), "|") + "\n"
	}
	return out, nil
}

func (s *scripted) logged(_ *script.State, args []string) (string, error) {
	count := 0
	for line := range strings.Lines(s.replicas["a"].log.String()) {
		if !slices.ContainsFunc(args, func(part string) bool { return !strings.Contains(line, part) }) {
			count++
		}
	}
	return fmt.Sprintln(count), nil
}

func (s *scripted) ready(*script.State, []string) (string, error) {
	out := ""
	for _, f := range s.replicas["a"].checks.Status().Failures {
		out += f.Reason + "\n"
	}
	return out, nil
}
