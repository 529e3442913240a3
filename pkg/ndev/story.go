// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	kubetypes "k8s.io/apimachinery/pkg/types"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// maxEvents is how many of the last events a story has.
const maxEvents = 20

// Story is all that the API server knows of a pod's devices.
type Story struct {
	metav1.TypeMeta `json:",inline"`

	Pod PodState `json:"pod"`
	// Node is the driver on the pod's node, nil where the pod has none yet or the node has no NodeConfig.
	Node   *NodeState   `json:"node,omitempty"`
	Claims []ClaimState `json:"claims"`
	// Networks are those that the claims name.
	Networks []NetworkState `json:"networks,omitempty"`
	// Events are the last ones of pod and claims, the latest last.
	Events []Event `json:"events,omitempty"`
	// Missing says what is not as it should be. Nothing in it: the pod has all that it asks for.
	Missing []Finding `json:"missing"`
	// Unread is what could not be read, and so is not told.
	Unread []string `json:"unread,omitempty"`
}

// DeepCopyObject implements [runtime.Object]. Printers do not change what they print: what the story points to is the same.
func (s *Story) DeepCopyObject() runtime.Object {
	c := *s
	return &c
}

// PodState is the pod.
type PodState struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Node      string `json:"node,omitempty"`
	Phase     string `json:"phase"`
	// Waiting are reason and message of what the pod or a container waits for.
	Waiting []string `json:"waiting,omitempty"`
}

// NodeState is the driver on a node.
type NodeState struct {
	Name       string             `json:"name"`
	Driver     string             `json:"driver"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// ClaimState is a claim of the pod.
type ClaimState struct {
	// PodClaim is the name that the pod has for the claim, and Containers those that list it.
	PodClaim   string   `json:"podClaim"`
	Containers []string `json:"containers,omitempty"`
	// Template is the template that the claim is made from, if any, and Name the claim's name, empty while there is none.
	Template string `json:"template,omitempty"`
	Name     string `json:"name,omitempty"`
	// Requests and Parameters are what was asked.
	Requests   []Request   `json:"requests,omitempty"`
	Parameters []Parameter `json:"parameters,omitempty"`
	// Devices are those that were allotted.
	Devices []Device `json:"devices,omitempty"`
	// ReservedFor are the pods that may use the claim.
	ReservedFor []string `json:"reservedFor,omitempty"`
}

// Request is what a claim asks for.
type Request struct {
	Name  string `json:"name"`
	Class string `json:"class"`
	// Count is the number of devices, 0 for all that match.
	Count     int64    `json:"count"`
	Selectors []string `json:"selectors,omitempty"`
	// Offered counts the driver's devices, of a claim that is allotted none.
	Offered *Offered `json:"offered,omitempty"`

	tolerations []resourceapi.DeviceToleration
}

// Parameter is a configuration of the claim or of a class.
type Parameter struct {
	// Source is the claim, or the device class.
	Source string `json:"source"`
	// Requests are those that it is for, none for all.
	Requests []string              `json:"requests,omitempty"`
	Driver   string                `json:"driver"`
	Values   *runtime.RawExtension `json:"values,omitempty"`
}

// NetworkState is a network that a claim names.
type NetworkState struct {
	Name  string   `json:"name"`
	Found bool     `json:"found"`
	VLAN  int32    `json:"vlan,omitempty"`
	Pools []string `json:"pools,omitempty"`
	// Used and Free count its addresses.
	Used       int64              `json:"used,omitempty"`
	Free       int64              `json:"free,omitempty"`
	Conditions []metav1.Condition `json:"conditions,omitempty"`
	// Addresses are those that the pod's claims have, Released ones are kept for the pod's name.
	Addresses []HeldAddress `json:"addresses,omitempty"`
}

// HeldAddress is an address that a claim of the pod has, or that is kept for the pod's name.
type HeldAddress struct {
	Address string `json:"address"`
	State   string `json:"state"`
	Node    string `json:"node"`
	PodUID  string `json:"podUID"`
}

// Event is something that was said of the pod or a claim.
type Event struct {
	Last    metav1.Time `json:"last"`
	Type    string      `json:"type"`
	Object  string      `json:"object"`
	Reason  string      `json:"reason"`
	From    string      `json:"from,omitempty"`
	Count   int32       `json:"count"`
	Message string      `json:"message"`
}

// teller gathers a story.
type teller struct {
	*cluster
	*Story
	pod     *corev1.Pod
	drivers []string
	claims  map[string]*resourceapi.ResourceClaim // by the pod's name for them
	config  *v2alpha1.CiliumNetworkDriverNodeConfig
	// noTemplate are the pod's claims whose template does not exist.
	noTemplate map[string]bool
	namespace  *corev1.Namespace
	// networks are all that there are; read says whether that is known.
	networks     map[string]*v2alpha1.CiliumNetworkDriverNetwork
	networksRead bool
	configRead   bool
}

// story tells what there is to know of the pod. What the reader may not read is left out, and said to be.
func (c *cluster) story(ctx context.Context, namespace, name, driver string) (*Story, error) {
	pod, err := c.kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, explain(fmt.Sprintf("get pod %s/%s", namespace, name), err)
	}
	t := &teller{
		cluster: c, pod: pod, claims: map[string]*resourceapi.ResourceClaim{}, noTemplate: map[string]bool{},
		networks: map[string]*v2alpha1.CiliumNetworkDriverNetwork{},
		Story:    &Story{TypeMeta: metav1.TypeMeta{APIVersion: APIVersion, Kind: "Story"}, Claims: []ClaimState{}, Missing: []Finding{}},
	}
	t.Pod = podState(pod)
	t.readNode(ctx)
	t.drivers = []string{cmp.Or(driver, v2alpha1.DefaultDriverName)}
	if driver == "" && t.config != nil {
		t.drivers = append(t.drivers, driverOf(t.config))
	}
	if err := t.readClaims(ctx); err != nil {
		return nil, err
	}
	t.readDevices(ctx)
	t.readNetworks(ctx)
	t.readEvents(ctx)
	t.find()
	return t.Story, nil
}

func (t *teller) unread(what string, err error) {
	if err != nil {
		t.Unread = append(t.Unread, what+": "+err.Error())
	}
}

func (t *teller) isOurs(driver string) bool { return slices.Contains(t.drivers, driver) }

func podState(pod *corev1.Pod) PodState {
	state := PodState{Namespace: pod.Namespace, Name: pod.Name, Node: pod.Spec.NodeName, Phase: string(pod.Status.Phase)}
	if pod.DeletionTimestamp != nil {
		state.Phase = "Terminating"
	}
	if pod.Status.Reason != "" {
		state.Waiting = append(state.Waiting, pod.Status.Reason+": "+pod.Status.Message)
	}
	for _, c := range pod.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status != corev1.ConditionTrue {
			state.Waiting = append(state.Waiting, c.Reason+": "+c.Message)
		}
	}
	for _, s := range slices.Concat(pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses) {
		if w := s.State.Waiting; w != nil {
			text := "container " + s.Name + ": " + w.Reason
			if w.Message != "" {
				text += ": " + w.Message
			}
			state.Waiting = append(state.Waiting, text)
		}
	}
	return state
}

func (t *teller) readNode(ctx context.Context) {
	if t.pod.Spec.NodeName == "" {
		return
	}
	err := t.nodeConfigs(ctx, t.pod.Spec.NodeName, func(config *v2alpha1.CiliumNetworkDriverNodeConfig) {
		t.config = config.DeepCopy()
	})
	t.unread("the driver on the pod's node", err)
	t.configRead = err == nil
	if t.config != nil {
		t.Node = &NodeState{Name: t.config.Name, Driver: driverOf(t.config), Conditions: t.config.Status.Conditions}
	}
}

// readClaims reads the claims that the pod names, and the one that was made for its extended resources.
func (t *teller) readClaims(ctx context.Context) error {
	names := map[string]string{}
	for _, s := range t.pod.Status.ResourceClaimStatuses {
		if s.ResourceClaimName != nil {
			names[s.Name] = *s.ResourceClaimName
		}
	}
	for _, ref := range t.pod.Spec.ResourceClaims {
		state := ClaimState{PodClaim: ref.Name, Name: names[ref.Name]}
		if ref.ResourceClaimName != nil {
			state.Name = *ref.ResourceClaimName
		}
		if ref.ResourceClaimTemplateName != nil {
			state.Template = *ref.ResourceClaimTemplateName
		}
		for _, c := range slices.Concat(t.pod.Spec.InitContainers, t.pod.Spec.Containers) {
			if slices.ContainsFunc(c.Resources.Claims, func(r corev1.ResourceClaim) bool { return r.Name == ref.Name }) {
				state.Containers = append(state.Containers, c.Name)
			}
		}
		t.Claims = append(t.Claims, state)
	}
	if s := t.pod.Status.ExtendedResourceClaimStatus; s != nil {
		state := ClaimState{PodClaim: "extended resources", Name: s.ResourceClaimName}
		for _, m := range s.RequestMappings {
			if !slices.Contains(state.Containers, m.ContainerName) {
				state.Containers = append(state.Containers, m.ContainerName)
			}
		}
		t.Claims = append(t.Claims, state)
	}
	for i := range t.Claims {
		if err := t.readClaim(ctx, &t.Claims[i]); err != nil {
			return err
		}
	}
	return nil
}

func (t *teller) readClaim(ctx context.Context, state *ClaimState) error {
	if state.Name == "" {
		_, err := t.kube.ResourceV1().ResourceClaimTemplates(t.pod.Namespace).Get(ctx, state.Template, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			t.noTemplate[state.PodClaim] = true
			return nil
		}
		t.unread("claim template "+state.Template, err)
		return nil
	}
	claim, err := t.kube.ResourceV1().ResourceClaims(t.pod.Namespace).Get(ctx, state.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return explain("get claim "+state.Name, err)
	}
	t.claims[state.PodClaim] = claim
	for _, r := range claim.Spec.Devices.Requests {
		state.Requests = append(state.Requests, requestsOf(r)...)
	}
	configs := claim.Spec.Devices.Config
	if a := claim.Status.Allocation; a != nil {
		configs = nil
		for _, c := range a.Devices.Config {
			if c.Opaque != nil {
				state.Parameters = append(state.Parameters, parameterOf(sourceOf(c.Source), c.Requests, c.Opaque))
			}
		}
	}
	for _, c := range configs {
		if c.Opaque != nil {
			state.Parameters = append(state.Parameters, parameterOf(sourceClaim, c.Requests, c.Opaque))
		}
	}
	for _, consumer := range claim.Status.ReservedFor {
		if consumer.Resource == "pods" {
			state.ReservedFor = append(state.ReservedFor, consumer.Name)
		}
	}
	return nil
}

const (
	sourceClaim = "claim"
	sourceClass = "device class"
)

func sourceOf(source resourceapi.AllocationConfigSource) string {
	if source == resourceapi.AllocationConfigSourceClass {
		return sourceClass
	}
	return sourceClaim
}

func parameterOf(source string, requests []string, opaque *resourceapi.OpaqueDeviceConfiguration) Parameter {
	return Parameter{Source: source, Requests: requests, Driver: opaque.Driver, Values: &opaque.Parameters}
}

// requestsOf returns the request, or its alternatives.
func requestsOf(r resourceapi.DeviceRequest) []Request {
	if r.Exactly != nil {
		return []Request{newRequest(r.Name, r.Exactly.DeviceClassName, r.Exactly.AllocationMode, r.Exactly.Count, r.Exactly.Selectors,
			r.Exactly.Tolerations)}
	}
	var requests []Request
	for _, sub := range r.FirstAvailable {
		requests = append(requests, newRequest(r.Name+"/"+sub.Name, sub.DeviceClassName, sub.AllocationMode, sub.Count, sub.Selectors,
			sub.Tolerations))
	}
	return requests
}

func newRequest(name, class string, mode resourceapi.DeviceAllocationMode, count int64, selectors []resourceapi.DeviceSelector,
	tolerations []resourceapi.DeviceToleration,
) Request {
	r := Request{Name: name, Class: class, Count: max(count, 1), tolerations: tolerations}
	if mode == resourceapi.DeviceAllocationModeAll {
		r.Count = 0
	}
	for _, s := range selectors {
		if s.CEL != nil {
			r.Selectors = append(r.Selectors, s.CEL.Expression)
		}
	}
	return r
}

// readDevices completes what was allotted by the slices of the node, and counts what there is for claims that are allotted nothing.
func (t *teller) readDevices(ctx context.Context) {
	offered := map[key]offer{}
	nodes := map[string]bool{}
	for _, claim := range t.claims {
		for k := range usesOf(claim) {
			if node, _ := split(k.pool); t.isOurs(k.driver) {
				nodes[node] = true
			}
		}
	}
	slicesRead := true
	for node := range nodes {
		for _, driver := range slices.Compact(slices.Sorted(slices.Values(t.drivers))) {
			err := t.slices(ctx, driver, node, func(slice *resourceapi.ResourceSlice) {
				for _, o := range offersOf(slice) {
					offered[key{o.Driver, o.published, o.Device.Device}] = o
				}
			})
			if err != nil {
				slicesRead = false
				t.unread("what the node offers, and so the devices' health", err)
			}
		}
	}
	for i := range t.Claims {
		state := &t.Claims[i]
		claim := t.claims[state.PodClaim]
		if claim == nil {
			continue
		}
		uses := usesOf(claim)
		for _, k := range slices.SortedFunc(maps.Keys(uses), func(a, b key) int {
			return cmp.Or(cmp.Compare(uses[a].Request, uses[b].Request), cmp.Compare(a.device, b.device), cmp.Compare(a.pool, b.pool))
		}) {
			o, ok := offered[k]
			switch {
			case ok:
				state.Devices = append(state.Devices, o.with(uses[k]))
			case slicesRead && t.isOurs(k.driver):
				state.Devices = append(state.Devices, withdrawn(k, uses[k]))
			default: // another driver's, whose slices are not looked at
				node, pool := split(k.pool)
				d := Device{Node: node, Pool: pool, Device: k.device, Driver: k.driver}
				state.Devices = append(state.Devices, offer{Device: d}.with(uses[k]))
			}
		}
	}
	t.count(ctx)
}

func (t *teller) readNetworks(ctx context.Context) {
	names := map[string]bool{}
	for _, claim := range t.Claims {
		for _, p := range claim.Parameters {
			if name := networkOf(p); t.isOurs(p.Driver) && name != "" {
				names[name] = true
			}
		}
	}
	if len(names) == 0 {
		return
	}
	err := t.cluster.networks(ctx, func(n *v2alpha1.CiliumNetworkDriverNetwork) {
		if names[n.Name] {
			t.networks[n.Name] = n.DeepCopy()
		}
	})
	t.unread("the networks that the claims name", err)
	t.networksRead = err == nil
	namespace, err := t.kube.CoreV1().Namespaces().Get(ctx, t.pod.Namespace, metav1.GetOptions{})
	t.unread("the labels of the pod's namespace", err)
	if err == nil {
		t.namespace = namespace
	}
	held := map[string][]HeldAddress{}
	if t.pod.Spec.NodeName != "" {
		err := t.addresses(ctx, t.pod.Spec.NodeName, func(a *v2alpha1.CiliumNetworkDriverAddress) {
			if a.Spec.Namespace == t.pod.Namespace && a.Spec.Pod.Name == t.pod.Name {
				held[a.Spec.Network] = append(held[a.Spec.Network], HeldAddress{a.Spec.Address, a.Spec.State, a.Spec.Node, a.Spec.Pod.UID})
			}
		})
		t.unread("the addresses of the node's devices", err)
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		state := NetworkState{Name: name, Addresses: held[name]}
		if n := t.networks[name]; n != nil {
			state.Found, state.VLAN, state.Pools = true, n.Spec.Vlan, n.Spec.Pools
			state.Used, state.Free, state.Conditions = n.Status.UsedAddresses, n.Status.FreeAddresses, n.Status.Conditions
		}
		t.Networks = append(t.Networks, state)
	}
}

// readEvents reads what was said of the pod and its claims, by their UIDs: another pod of the name may have had events too.
func (t *teller) readEvents(ctx context.Context) {
	subjects := map[kubetypes.UID]string{t.pod.UID: "pod"}
	for _, claim := range t.claims {
		subjects[claim.UID] = "claim " + claim.Name
	}
	var events []Event
	for uid, object := range subjects {
		options := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("involvedObject.uid", string(uid)).String()}
		err := each(ctx, "Events", options, func(ctx context.Context, options metav1.ListOptions) (runtime.Object, error) {
			return t.kube.CoreV1().Events(t.pod.Namespace).List(ctx, options)
		}, func(e *corev1.Event) { events = append(events, eventOf(e, object)) })
		if err != nil {
			t.unread("events", err)
			break
		}
	}
	slices.SortFunc(events, func(a, b Event) int {
		return cmp.Or(a.Last.Compare(b.Last.Time), cmp.Compare(a.Object, b.Object), cmp.Compare(a.Message, b.Message))
	})
	t.Events = events[max(0, len(events)-maxEvents):]
}

func eventOf(e *corev1.Event, object string) Event {
	event := Event{
		Last: e.LastTimestamp, Type: e.Type, Object: object, Reason: e.Reason, From: cmp.Or(e.Source.Component, e.ReportingController),
		Count: max(e.Count, 1), Message: e.Message,
	}
	if e.Series != nil {
		event.Count, event.Last = e.Series.Count, metav1.NewTime(e.Series.LastObservedTime.Time)
	}
	if event.Last.IsZero() {
		event.Last = metav1.NewTime(e.EventTime.Time)
	}
	if event.Last.IsZero() {
		event.Last = e.CreationTimestamp
	}
	return event
}
